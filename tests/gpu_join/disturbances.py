"""What befalls a job. Each returns how many seconds it took the job to be at work again."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable

from jobs import Job, Setup

SETTLED_STEP = 12
# Where a lane dies: gradients, decision, update and weights of a step, in the order of the step.
LANE_POINTS = (
    "lane.armed",
    "lane.collect.reduced",
    "lane.gathered",
    "lane.decision",
    "lane.update.before_batch",
    "lane.update.before_flip",
    "lane.update.after_flip",
    "lane.publish.bucket",
    "lane.published",
)
IMPATIENT = ("--step_timeout=3s", "--lane_timeout=8s")


@dataclasses.dataclass(frozen=True)
class Disturbance:
    name: str
    happens: Callable[[Job], float]
    victim: str = ""  # whose end it is, where there is a limit for it
    ends_trainers: bool = False  # some are started again by whoever watches them
    # Under MPS all that is at work on the GPU ends, when MPS says so: up to 4.4 s later.
    mps_ends_all: bool = False
    nodes_max: int = 2
    point: str = ""
    flags: tuple[str, ...] = ()  # of daemons
    lanes_can_fault: bool = False

    @property
    def hurts_lanes(self) -> bool:
        """Whose memory it is that trainers have does not matter then."""
        return bool(self.point) or self.lanes_can_fault


def _time_to_work(job: Job, begin: float) -> float:
    job.wait_for_step(job.reached + 2)
    return time.monotonic() - begin


def _settle(job: Job) -> None:
    job.start_trainers()
    job.wait_for_step(SETTLED_STEP)


def _lane_dies(job: Job) -> float:
    _settle(job)
    job.assassin.kill_the_next()
    job.wait("a lane stands at the point", job.assassin.has_killed.is_set)
    return _time_to_work(job, time.monotonic())


def _trainer_dies(job: Job) -> float:
    _settle(job)
    job.trainers[-1].kill()
    begin = time.monotonic()
    job.replace_trainer(-1 % job.world)
    return _time_to_work(job, begin)


def _trainers_die(job: Job) -> float:
    """All of them: the state is the daemon's."""
    _settle(job)
    for trainer in job.trainers:
        trainer.kill()
    begin = time.monotonic()
    for rank in range(job.world):
        job.replace_trainer(rank)
    return _time_to_work(job, begin)


def _trainer_stops(job: Job) -> float:
    """For so long that it counts as dead. Its replacement is let in when its process has ended."""
    _settle(job)
    stopped = job.trainers[-1]
    stopped.process.send_signal(signal.SIGSTOP)
    job.wait("it counts as dead", lambda: job.says("counts as dead"))
    stopped.kill()
    begin = time.monotonic()
    job.replace_trainer(-1 % job.world)
    return _time_to_work(job, begin)


def _trainer_faults(job: Job) -> float:
    """An illegal access, which under MPS ends all that is at work on the GPU, its lane too."""
    _settle(job)
    job.trainers[-1].process.send_signal(signal.SIGUSR1)
    begin = time.monotonic()
    job.wait("its context fails", lambda: job.relaunches > 0)
    return _time_to_work(job, begin)


def _lane_faults(job: Job) -> float:
    """An illegal access of its own, which under MPS ends all that is at work on its GPU."""
    _settle(job)
    lane = job.lanes()[-1]
    os.kill(lane, signal.SIGUSR1)
    begin = time.monotonic()
    job.wait("an illegal access", lambda: job.says("an illegal access is launched: 0"))
    job.wait("its process ends", lambda: lane not in job.lanes())
    return _time_to_work(job, begin)


def _trainer_dies_computing(job: Job) -> float:
    """In a kernel that fills the GPU and would not end."""
    _settle(job)
    busy = job.trainers[-1]
    busy.process.send_signal(signal.SIGUSR2)
    job.wait("its kernel runs", lambda: "a kernel runs for ever" in list(busy.lines))
    busy.kill()
    begin = time.monotonic()
    job.replace_trainer(-1 % job.world)
    return _time_to_work(job, begin)


def _daemon_dies(job: Job) -> float:
    _settle(job)
    job.wait("a snapshot", lambda: job.trainers[0].has_snapshot)
    begin = time.monotonic()
    reached = job.reached
    job.replace_daemon()
    job.wait_for_step(reached + 1)
    return time.monotonic() - begin


def lanes_and_trainers_die(job: Job, look: Callable[[], None]) -> None:
    """While nobody but the stopped daemons is there, `look` sees what they hold."""
    _settle(job)
    lanes = job.lanes()
    for daemon in job.daemons:
        daemon.process.send_signal(signal.SIGSTOP)
    for pid in lanes:
        os.kill(pid, signal.SIGKILL)
    for trainer in job.trainers:
        trainer.kill()
    look()
    for daemon in job.daemons:
        daemon.process.send_signal(signal.SIGCONT)
    for rank in range(job.world):
        job.replace_trainer(rank)


def limit_s(victim: str, setup: Setup) -> float:
    """From the end of a process until the job is at work again."""
    if victim == "trainer":
        return 2.0
    return 0.6 if setup.nodes == 1 else 1.8


ALL = (
    Disturbance("trainer killed", _trainer_dies, "trainer"),
    Disturbance(
        "trainer killed in a kernel", _trainer_dies_computing, "trainer", mps_ends_all=True
    ),
    Disturbance("trainers killed", _trainers_die, "trainer"),
    Disturbance("trainer stopped", _trainer_stops, "trainer", flags=IMPATIENT),
    Disturbance("trainer's illegal access", _trainer_faults, ends_trainers=True),
    Disturbance("lane's illegal access", _lane_faults, lanes_can_fault=True),
    *(Disturbance(f"killed at {point}", _lane_dies, "lane", point=point) for point in LANE_POINTS),
    Disturbance("daemon killed", _daemon_dies, nodes_max=1024),
)
