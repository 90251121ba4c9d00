"""Trainers of other users: processes that become somebody else, and do what a test says."""

import multiprocessing
import os

import core_trainer
import dmuond
import pytest

GROUP = 65534
ONE, OTHER = 65534, 65533  # two users who are neither root nor the daemon's
SQUARE = core_trainer.Tensor("square", (16, 16))

# Its server has imported everything, and called nothing of gRPC, when a process is forked off it.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["users"])

need_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def _serve(uid: int, orders) -> None:
    core_trainer.first_weight(SQUARE)  # imports the last: where root's Python lies may be closed
    os.environ["DMUOND_LAUNCH"] = f"of uid {uid}"
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(uid)
    trainer = None
    while True:
        try:
            order, arguments, named = orders.recv()
        except EOFError:
            return
        try:
            if order == "join":
                address, name, rank, world = arguments
                held = ((core_trainer.whole(SQUARE),),) * world
                job = core_trainer.Job((SQUARE,), held, name=name)
                trainer = core_trainer.Trainer(rank, world, job, address=address, **named)
            elif order == "open":
                address, name, rank, world = arguments
                session = dmuond.Session(address, job=name, rank=rank, world_size=world)
                orders.send(session.last_committed_step)
                continue
            elif order == "step":
                trainer.step()
            elif order == "call":
                getattr(trainer.session, arguments[0])(*arguments[1:])
            orders.send(trainer.session.last_committed_step)
        except dmuond.Error as error:
            orders.send(error)


class User:
    """One trainer at a time, in a process of the user's. What it raises is raised here."""

    def __init__(self, uid: int):
        self._orders, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=_serve, args=(uid, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, order: str, *arguments, **named) -> None:
        """The answer comes by end()."""
        self._orders.send((order, arguments, named))

    def end(self) -> int:
        """The job's last step."""
        answer = self._orders.recv()
        if isinstance(answer, dmuond.Error):
            raise answer
        return answer

    def join(self, *arguments, **named) -> int:
        self.begin("join", *arguments, **named)
        return self.end()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def together(users: list[User], order: str) -> list[int]:
    for user in users:
        user.begin(order)
    return [user.end() for user in users]
