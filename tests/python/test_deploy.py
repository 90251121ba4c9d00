"""What deploy/ ships is valid, and keeps the promises that its comments and docs make."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from daemons import program

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
# The oldest version with native sidecars on by default, and the newest schema that there is.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]


def documents(manifest: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(manifest.read_text()) if document]


def pod_specs() -> list[dict]:
    found = []
    for manifest in MANIFESTS:
        for document in documents(manifest):
            spec = document["spec"]
            found.append(spec["template"]["spec"] if "template" in spec else spec)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifest_follows_the_kubernetes_schema(manifest: Path, version: str):
    for document in documents(manifest):
        kubernetes_validate.validate(document, version, strict=True)


def test_there_are_manifests_to_check():
    assert MANIFESTS


def sidecar_of(pod: dict) -> dict:
    (sidecar,) = [c for c in pod["initContainers"] if c["name"] == "dmuond"]
    return sidecar


@pytest.mark.parametrize("pod", pod_specs())
def test_daemon_is_a_native_sidecar_with_probes_on_its_two_states(pod: dict):
    sidecar = sidecar_of(pod)
    assert sidecar["restartPolicy"] == "Always"
    services = {
        kind: sidecar[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: probe["service"] for kind, probe in services.items()} == {
        "startup": "ready",
        "readiness": "ready",
        "liveness": "live",
    }
    (port,) = {probe["port"] for probe in services.values()}
    assert port in [entry["containerPort"] for entry in sidecar["ports"]]
    assert any(argument.endswith(f":{port}") for argument in sidecar["args"])


@pytest.mark.parametrize("pod", pod_specs())
def test_trainer_finds_the_daemons_socket_on_the_shared_volume(pod: dict):
    (socket,) = [a.split("=")[1] for a in sidecar_of(pod)["args"] if a.startswith("--socket=")]
    (trainer,) = pod["containers"]
    address = {entry["name"]: entry["value"] for entry in trainer["env"]}["DMUOND_ADDRESS"]
    assert address == f"unix:{socket}"
    for container in (sidecar_of(pod), trainer):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert socket.startswith(mounts["sockets"] + "/")


@pytest.mark.parametrize("pod", pod_specs())
def test_daemon_accepts_the_sidecars_flags(pod: dict, tmp_path: Path):
    arguments = [a.replace("/run/dmuond", str(tmp_path)) for a in sidecar_of(pod)["args"]]
    done = subprocess.run(
        [program("dmuond"), "--check_config", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pod", pod_specs())
def test_trainers_flags_are_the_demos(pod: dict):
    (trainer,) = pod["containers"]
    interpreter, *module = trainer["command"][:3]
    assert (interpreter, module[0]) == ("python", "-m")
    usage = subprocess.run(
        [sys.executable, *module, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for argument in trainer["command"][3:]:
        assert f"{argument.split('=')[0]} " in usage


@pytest.mark.parametrize("pod", pod_specs())
def test_no_container_has_privileges(pod: dict):
    assert pod["securityContext"]["runAsNonRoot"]
    for container in pod["initContainers"] + pod["containers"]:
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["limits"]["memory"]


def drain_timeout_s(*arguments: str) -> int:
    printed = subprocess.run(
        [program("dmuond"), "--print_config", *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (seconds,) = re.findall(r'^drain_timeout: "(\d+)s"$', printed, re.M)
    return int(seconds)


@pytest.mark.parametrize("pod", pod_specs())
def test_the_kubelet_waits_until_a_daemon_has_left(pod: dict, tmp_path: Path):
    arguments = [a.replace("/run/dmuond", str(tmp_path)) for a in sidecar_of(pod)["args"]]
    assert drain_timeout_s(*arguments) + 10 <= pod["terminationGracePeriodSeconds"]


def test_systemd_waits_until_a_daemon_has_left_and_then_lets_it_be():
    unit = (ROOT / "deploy/systemd/dmuond.service").read_text()
    (stop_after,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert drain_timeout_s() + 10 <= int(stop_after)
    assert re.findall(r"^Restart=(.*)$", unit, re.M) == ["on-failure"]
    assert re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.M) == ["3"]  # could not save


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_unit_has_no_unknown_keys(tmp_path: Path):
    unit = (ROOT / "deploy/systemd/dmuond.service").read_text()
    installed = tmp_path / "dmuond.service"
    installed.write_text(unit.replace("/usr/bin/dmuond", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", installed], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_units_exposure_is_low():
    unit = ROOT / "deploy/systemd/dmuond.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=29", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # not above 2.9


@pytest.mark.timeout(900)
def test_the_daemon_trains_under_its_unit(tmp_path: Path):
    """A systemd of its own, process 1 of a namespace and a small Debian, starts the unit."""
    if os.environ.get("DMUOND_SYSTEMD") != "1":
        pytest.skip("needs DMUOND_SYSTEMD=1, root, debootstrap and the network")
    done = subprocess.run(
        [ROOT / "tests/deploy/boot_unit.sh", program("dmuond").parent, sys.executable, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "another user: 0" in said, said
    assert "its own user: 0" in said, said
    assert re.search(r"^Seccomp:\s+2$", said, re.M), said  # the filter is on
    assert re.search(r"^CapBnd:\s+0+$", said, re.M), said
    assert re.search(r"^saved at step 4", said, re.M), said  # into ReadWritePaths
    assert "Result=success" in said, said
