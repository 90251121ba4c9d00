"""What the parts share: the machine, its setups, and the first run, which all are compared with."""

from collections.abc import Iterator

from jobs import Job, Setup, Weights
from machine import Machine
from rows import Check, WrongError

ALONE = Setup(1, 1)


class Run:
    def __init__(self, machine: Machine, options):
        self.machine = machine
        self._options = options
        self._first: Weights = {}

    @property
    def mode(self) -> str:
        """The end of rows' names."""
        return " mps" if self.machine.with_mps else ""

    @property
    def steps(self) -> int:
        return self._options.steps

    @property
    def setups(self) -> list[Setup]:
        """One lane for all; one for each GPU; the same of two daemons; and of one each."""
        gpus = self.machine.gpus
        setups = [ALONE, Setup(1, gpus)]
        if gpus > 1:
            setups += [Setup(2, gpus // 2), Setup(gpus, 1)]
        chosen = [setup for setup in setups if setup.nodes in self._options.nodes]
        return list(dict.fromkeys(chosen))

    def job(self, setup: Setup, name: str, steps: int = 0, point: str = "") -> Job:
        return Job(self.machine, self._options, setup, name, steps or self.steps, point)

    def first(self) -> Iterator[Check]:
        def look() -> str:
            job = self.job(ALONE, "first")
            job.start_trainers()
            self._first = job.finish()
            return f"{job.steps} steps of {job.world} trainers"

        if not self._first:
            yield Check(f"first run {ALONE}", "comes to its end", look, always=True)

    def compare(self, job: Job) -> str:
        """At the job's end, with which its daemons end."""
        return self.compare_weights(job, job.finish())

    def compare_weights(self, job: Job, weights: Weights) -> str:
        if any((rank, job.steps) not in weights for rank in range(job.world)):
            raise WrongError(f"no weights of step {job.steps}: it may need more --steps")
        wrong = [key for key in sorted(weights) if weights[key] != self._first[key]]
        if wrong:
            raise WrongError(f"other bits, first at rank {wrong[0][0]}, step {wrong[0][1]}")
        return f"{job.steps} steps, the same bits"
