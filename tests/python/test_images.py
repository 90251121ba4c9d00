"""The container images, built for real, and a job between two containers of them. On request."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pid_namespace
import pytest
from daemons import ROOT
from test_programs import wait_for

MINUTES = 60
DAEMON_BYTES_MAX = 200_000_000

pytestmark = pytest.mark.skipif(
    os.environ.get("DMUOND_IMAGES") != "1" or shutil.which("buildah") is None or os.getuid() != 0,
    reason="needs DMUOND_IMAGES=1, root, buildah, debootstrap and the network",
)


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def images() -> dict[str, dict]:
    """What `./dev image` has built, as OCI configurations by name."""
    built = subprocess.run([ROOT / "dev", "image"], cwd=ROOT, check=False)
    assert built.returncode == 0
    return {
        name: json.loads(buildah("inspect", "--type", "image", f"localhost/{name}:latest"))
        for name in ("dmuond", "dmuond-trainer")
    }


@contextlib.contextmanager
def container(image: str) -> Iterator[str]:
    name = buildah("from", f"localhost/{image}:latest")
    try:
        yield name
    finally:
        buildah("rm", name)


def command(name: str, shared: Path, *arguments: str) -> list[str]:
    """Runs in a container, as its user, with the folder at /run/dmuond/job.

    As under Kubernetes, where nothing else is said, each has a PID namespace of its own.
    """
    volume = f"--volume={shared}:/run/dmuond/job"
    run = ["buildah", "run", "--isolation=chroot", volume, name, "--", *arguments]
    return [*pid_namespace.under(), *run]


@pytest.mark.timeout(MINUTES * 60)
def test_images_are_small_and_say_what_they_are(images) -> None:
    for name, image in images.items():
        config = image["OCIv1"]["config"]
        assert config["User"].split(":")[0] == "10001", name
        labels = config["Labels"]
        assert labels["org.opencontainers.image.title"] == name
        assert len(labels["org.opencontainers.image.revision"]) == 40
        assert labels["org.opencontainers.image.version"] not in ("", "unknown")
    with container("dmuond") as name:
        root = buildah("mount", name)
        used = subprocess.run(["du", "-sxb", root], capture_output=True, text=True, check=True)
        assert int(used.stdout.split()[0]) < DAEMON_BYTES_MAX
    with container("dmuond-trainer") as name:
        root = Path(buildah("mount", name))
        for tool in ("pytest", "ruff"):
            assert not list(root.glob(f"opt/trainer/lib/python3*/site-packages/{tool}"))


@pytest.mark.timeout(MINUTES * 60)
def test_a_trainers_container_trains_against_the_daemons(images, tmp_path) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "job"
    shared.mkdir(mode=0o750)
    os.chown(shared, 10001, 10001)
    script = (
        "import torch, dmuond.torch as d; m = torch.nn.Linear(16, 16, bias=False); "
        "o = d.Muon(m, lr=0.02, address='unix:/run/dmuond/job/d.sock', verbose=False); "
        "x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)); losses = []\n"
        "for _ in range(50):\n"
        "    loss = (m(x) - x).square().mean(); losses.append(loss.item())\n"
        "    loss.backward(); o.step(); o.zero_grad()\n"
        "o.close(); print(losses[0], losses[-1])"
    )
    with container("dmuond") as daemons, container("dmuond-trainer") as trainers:
        serving = [
            "/opt/dmuond/bin/dmuond",
            "--devices=cpu:1",
            "--socket=/run/dmuond/job/d.sock",
        ]
        with subprocess.Popen(command(daemons, shared, *serving)) as daemon:
            try:
                wait_for(lambda: (shared / "d.sock").exists() or daemon.poll() is not None)
                trained = subprocess.run(
                    command(trainers, shared, "/opt/trainer/bin/python", "-c", script),
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=300,
                )
                assert trained.returncode == 0, trained.stderr
                first, last = map(float, trained.stdout.split()[-2:])
                assert last < first / 3
            finally:
                subprocess.run(["pkill", "-f", "socket=/run/dmuond/job/d.sock"], check=False)
                daemon.wait(60)
