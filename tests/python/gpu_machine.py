"""A machine with GPUs of the fake driver, for tests: what they start while it is there is on it."""

from pathlib import Path

import dmuond
import gpus
import one_matrix
from daemons import lane_pids, program


class Machine:
    """Attributes: folder (of the driver's logs), addresses, daemon (the last one started)."""

    def __init__(self, folder, monkeypatch, daemons, ranks, devices: int = 2):
        self.folder = folder
        self._monkeypatch, self._daemons, self._ranks = monkeypatch, daemons, ranks
        self.set(gpus.environment(folder, devices))

    def set(self, variables: dict[str, str]):
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def start_daemon(self, lanes: int = 1, *flags: str, devices: str = "", nodes: int = 1):
        """With devices="cpu:N" the lanes have none of the GPUs; a node has GPUs of its own."""
        lane = f"--lane_binary={program('dmuond-lane-fake')}"
        more = [f"--devices={devices or f'cuda:{lanes}'}", lane, *flags]
        seen = [range(node * lanes, (node + 1) * lanes) for node in range(nodes)]
        environments = [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} for own in seen]
        self.addresses = self._daemons.start(nodes, lanes, *more, environments=environments)
        self.daemon = self._daemons.members[-1]

    def compute_as_the_lanes(self):
        """Lanes of daemons that start from now on compute the bits of the CPU's, which is here."""
        self.set(self._ranks.run(_numerics, 1, self.addresses, self.daemon.process.pid)[0])

    def run(self, function, *arguments, world: int = 1, **options):
        return self._ranks.run(function, world, self.addresses, *arguments, **options)

    def run_one(self, function, *arguments):
        return self.run(function, *arguments)[0]


def _numerics(rank: int, world: int, daemon: int) -> dict[str, str]:
    """What the daemon has its lanes compute with. They are there while a job is."""
    with dmuond.Session(job="numerics") as session:
        one_matrix.register(session)
        lane = lane_pids(daemon)[0]
        text = Path(f"/proc/{lane}/environ").read_text()
        session.push()
    variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    return {name: v for name, v in variables.items() if name.startswith("OPENBLAS_")}
