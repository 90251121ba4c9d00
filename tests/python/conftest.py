"""Fixtures of the Python tests: a fake daemon, real ones on private sockets, ranks, optimizers."""

import os

# Threads that spin for each other make products of small matrices up to 600 times as slow on a busy
# machine. Said before numpy and torch are imported, and to trainers in processes of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from daemons import Daemons
from dmuond import places
from fake_daemon import FakeDaemon
from survivors import STEPS, Survivor
from trainers import Ranks

# Whoever runs the tests: the job of a trainer that names none is not called after that program.
os.environ["DMUOND_JOB"] = "default"
# Who loses a daemon here for good hears of it at once; tests of successors set it themselves.
os.environ["DMUOND_RECONNECT_S"] = "0"
# A daemon whose state machines meet an event that they cannot have ends here.
os.environ["DMUOND_CHECKED"] = "1"


def pytest_addoption(parser):
    parser.addoption("--record-bits", action="store_true", help="for test_golden_bits.py")


def pytest_sessionfinish():
    """Tests leave jobs in every way; what became of them is no news at the end."""
    places.forget()


@pytest.fixture
def fake(tmp_path):
    daemon = FakeDaemon(str(tmp_path / "d.sock"))
    yield daemon
    daemon.die()


@pytest.fixture
def daemons():
    """Starts real daemons; ends them, and shows their logs when the test has failed."""
    with Daemons() as started:
        yield started


@pytest.fixture
def address(daemons):
    """The address of a daemon with one lane, which does not wait for replacements."""
    return daemons.start(1, 1, "--session_linger=0")[0]


@pytest.fixture(scope="session")
def undisturbed() -> list[str]:
    """What a Survivor of one rank prints in survivors.STEPS steps, if nothing happens to it."""
    with Daemons() as started:
        (address,) = started.start(1, 1)
        return Survivor(address, 0, 1, STEPS).finish()


@pytest.fixture(scope="module")
def ranks():
    """Runs functions in trainer processes, one for each rank."""
    with Ranks() as processes:
        yield processes


PLAIN = pytest.mark.rest("the same tests with poison, which ask for more")


@pytest.fixture(params=[pytest.param("plain", marks=PLAIN), "poison"])
def poison(request, monkeypatch):
    """A test that uses this runs twice: once with weights that are NaN until they are published."""
    monkeypatch.setenv("DMUOND_POISON", str(int(request.param == "poison")))
    return request.param == "poison"


@pytest.fixture(scope="module")
def one_daemon():
    """For the optimizers of all tests of a module: starting one takes longer than most of them."""
    with Daemons() as started:
        started.start(1, 1, "--session_linger=0", "--jobs_max=64")
        yield started.members[0]


@pytest.fixture
def muon(one_daemon, poison):
    """Makes optimizers of the test's own job; closes them at the end."""
    import habits  # imports torch, which most tests do without

    made, logged = [], len(one_daemon.text())
    own = {"address": f"unix:{one_daemon.path}", "job": f"job{logged}"}

    def make(model, lr=habits.LR, **options):
        made.append(habits.make_optimizer(model, lr, **own | options))
        return made[-1]

    with habits.torch_in_fp32():
        yield make
    for optimizer in made:
        if not optimizer.session.closed:
            optimizer.close()
    print(one_daemon.text()[logged:])
