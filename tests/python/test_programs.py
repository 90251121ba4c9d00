"""The programs as a user meets them: their log, their ports, and what a wrong command line gets."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import dmuond
import grpc
import pytest
from daemons import HANGS_AFTER_S, ROOT, free_port, program, secret_file
from test_core_client import scalars, two_matrices

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"  # ServerReflectionRequest.list_services = ""


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program(name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def train(address: str, steps: int = 2) -> None:
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        for _ in range(steps):
            session.step(scalars())


def wait_for(what) -> None:
    deadline = time.monotonic() + HANGS_AFTER_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_daemon_that_logs_warnings_is_silent_where_there_are_none(daemons):
    # Where no snapshots are made a job warns of that, and of nothing else.
    address = daemons.start(1, 1, "--log_level=warn")[0]
    train(address)
    lines = daemons.members[0].text().splitlines()
    assert [line for line in lines if "no snapshots are made" not in line] == []


def test_every_line_is_an_object_where_json_was_asked_for_those_of_lanes_too(daemons):
    address = daemons.start(1, 1, "--log_format=json", "--log_level=debug")[0]
    train(address)
    # A lane's lines may come after its trainer has left.
    wait_for(lambda: daemons.members[0].text().count('"msg":"decided"') == 3)
    lines = [json.loads(line) for line in daemons.members[0].text().splitlines()]
    assert all({"time", "level", "msg"} <= line.keys() for line in lines)
    decided = [line for line in lines if line["msg"] == "decided"]
    assert [line["step"] for line in decided if line["step"] > 0] == [1, 2]
    assert {(line["level"], line["job"], line["lane"]) for line in decided} == {
        ("debug", "default", 0)
    }


def test_a_changed_level_reaches_lanes_that_run_and_those_that_start_later(daemons):
    address = daemons.start(1, 1)[0]
    log = daemons.members[0].text
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        session.step(scalars())
        assert "msg=decided" not in log()
        assert run("dmuonctl", "log-level", "debug", f"--address={address}").returncode == 0
        session.step(scalars())
        wait_for(lambda: "step=2" in log())
        assert "level=debug msg=decided" in log()
        assert run("dmuonctl", "log-level", "error", f"--address={address}").returncode == 0
    before = log().count("msg=")
    train(address)
    assert log().count("msg=") == before


def test_lines_about_sessions_and_steps_say_which_job_and_epoch(daemons):
    address = daemons.start(1, 1)[0]
    train(address)
    wait_for(lambda: "session closed" in daemons.members[0].text())
    for message in ("session opened", "session closed", "plan made", "lane configured"):
        lines = [line for line in daemons.members[0].text().splitlines() if message in line]
        assert lines
        assert all(" job=default " in line and " epoch=1 " in line for line in lines), lines


def test_the_log_of_dmuonctl_run_is_warnings_alone():
    done = run("dmuonctl", "run", "--", "true")
    assert (done.returncode, done.stderr) == (0, "")


def reflects(target: str) -> bool:
    """Whether a server lists its services. Raises where it does not answer at all."""
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        call = channel.stream_stream(REFLECTION)
        try:
            answers = list(call(iter([LIST_SERVICES]), timeout=10, wait_for_ready=True))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise
        assert b"dmuond.v1.Trainer" in answers[0]
        return True


@pytest.mark.parametrize("flag", ["true", "false"])
def test_reflection_is_served_where_it_was_asked_for(daemons, flag):
    address = daemons.start(1, 1, f"--reflection={flag}")[0]
    assert reflects(address) == (flag == "true")


def probe(metrics: str, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(metrics, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_probes_hear_whether_the_daemon_is_ready_and_why_not(daemons, tmp_path):
    metrics, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
    ready = ("dmuonctl", "ready", f"--address={daemons.start(1, 1)[0]}")
    assert run(*ready).stdout == "ready\n"
    address = daemons.start_alone(
        "--nodes=2",
        "--node_rank=0",
        f"--coordinator={peer}",
        f"--peer_secret_file={secret_file(tmp_path)}",
        f"--metrics_address={metrics}",
    )
    why_not = "the group has not formed: these nodes have not joined: 1\n"
    wait_for(lambda: "msg=serving" in daemons.members[-1].text())
    assert probe(metrics, "/livez") == (200, "ok\n")
    assert probe(metrics, "/readyz") == (503, why_not)
    asked = run("dmuonctl", "ready", f"--address={address}")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == f"dmuonctl: not ready: {why_not}"
    nobody = run("dmuonctl", "ready", "--address=/nonexistent/socket")
    assert nobody.returncode == 1 and "no dmuond answers" in nobody.stderr


@pytest.mark.parametrize("core_type", ["Haswell", "Sandybridge", None])
def test_a_core_type_that_the_user_has_set_reaches_the_lanes_and_the_status(
    daemons, monkeypatch, core_type
):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    if core_type:
        monkeypatch.setenv("OPENBLAS_CORETYPE", core_type)
    address = daemons.start(1, 1)[0]
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        status = json.loads(run("dmuonctl", "status", "--json", f"--address={address}").stdout)
        doctor = run("dmuonctl", "doctor", f"--address={address}").stdout
    device = status["lanes"][0]["device"]
    if core_type:
        assert status["core_type"] == core_type
        assert f"openblas={core_type}" in device
        assert f"core type of its lanes {core_type}" in doctor
    elif status["core_type"]:  # left to OpenBLAS elsewhere
        assert f"openblas={status['core_type']}" in device


def test_every_mistake_of_a_command_line_and_its_file_is_reported_at_once(tmp_path):
    file = tmp_path / "config"
    file.write_text("skips_max: 0\n")
    done = run(
        "dmuond",
        "--check_config",
        f"--config={file}",
        "--step_timeout=abc",
        "--session_linger=0s",
        "--register_timeout=0s",
        "--threads=many",
        "--nosuch=1",
        "stray",
    )
    assert done.returncode == 2
    for mistake in (
        "--step_timeout=abc",
        "--register_timeout=0s",
        "--threads=many",
        "'--nosuch=1'",
        "'stray'",
        "--skips_max=0",
    ):
        assert mistake in done.stderr
    assert "session_linger" not in done.stderr


@pytest.mark.parametrize("name", ["dmuond", "dmuonctl"])
def test_help_and_version_are_answers_and_no_errors(name):
    helped = run(name, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--json" in helped.stdout or "--step_timeout (default: 10m)" in helped.stdout
    assert run(name, "--nosuch").returncode == 2


@pytest.mark.parametrize("name", ["dmuond", "dmuonctl", "dmuond-lane"])
def test_version_names_the_commit(name):
    told = run(name, "--version")
    assert (told.returncode, told.stderr) == (0, "")
    version, commit = rf"{name} \d+\.\d+\.\d+", "[0-9a-f]{12}(-dirty)?|unknown"
    assert re.match(rf"{version} \(commit ({commit})\)\n", told.stdout)


@pytest.mark.parametrize(
    "command",
    [("dmuonctl", "plan", "--model=llama3-8b"), ("dmuonctl", "--help"), ("dmuond", "--help")],
)
def test_output_that_is_not_written_is_an_error(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [program(command[0]), *command[1:]], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert f"{command[0]}: not all of the output could be written" in done.stderr


def test_a_digest_in_json_is_the_text_of_the_table():
    """Readers of JSON that keep numbers as doubles would change it."""
    plan = ("dmuonctl", "plan", "--model=llama3-8b")
    digest = json.loads(run(*plan, "--json").stdout)["digest"]
    assert re.fullmatch("[0-9a-f]{16}", digest)
    assert f"digest {digest}" in run(*plan).stdout


@pytest.mark.parametrize(
    ("name", "section", "source"),
    [("dmuond", 8, "daemon/process/config_flags.cc"), ("dmuonctl", 1, "ctl/main.cc")],
)
def test_a_man_page_has_every_flag_and_command_and_is_what_groff_reads(name, section, source):
    spec = importlib.util.spec_from_file_location("man_page", ROOT / "tools/cmake/man_page.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = maker.made_of(program(name), section)
    code = (ROOT / "server" / source).read_text()
    wanted = re.findall(r"ABSL_FLAG\([^,]+, (\w+),", code)
    assert len(wanted) > 20
    assert re.findall(r"^\.TP\n\\fB\\-\\-(\w+)\\fR", page, re.M) == sorted(wanted)
    commands = re.findall(r'^    \{"([a-z-]+)",', code, re.M)
    assert (len(commands) > 10) == (name == "dmuonctl")
    for command in commands:
        assert f".TP\n\\fB{maker.escaped(command)}" in page
    if not shutil.which("groff"):
        pytest.skip("this machine has no groff")
    read = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True
    )
    assert read.stderr == ""
    shown = " ".join(re.sub("\x1b\\[[0-9;]*m|.\b", "", read.stdout).split())
    assert f"{name} - " in shown and "SEE ALSO" in shown


def long_path(tmp_path: Path) -> Path:
    """A directory in which no socket can lie."""
    path = tmp_path / ("x" * 120)
    path.mkdir()
    return path


def test_a_path_that_is_too_long_for_a_socket_is_named_with_its_length_and_the_limit(tmp_path):
    folder = long_path(tmp_path)
    for name, arguments, variables in (
        ("dmuond", (f"--socket={folder}/d.sock",), {}),
        ("dmuonctl", ("status", f"--address={folder}/d.sock"), {}),
        ("dmuonctl", ("status",), {"DMUOND_ADDRESS": f"unix:{folder}/d.sock"}),
        ("dmuonctl", ("doctor", f"--address={folder}/d.sock"), {}),
        ("dmuonctl", ("run", "--", "echo", "it ran"), {"XDG_RUNTIME_DIR": str(folder)}),
    ):
        done = run(name, *arguments, **variables)
        said = done.stdout + done.stderr
        assert done.returncode != 0, arguments
        assert f"the path of the Unix socket '{folder}/" in said, said
        assert "bytes, at most 107 are possible" in said and "it ran" not in said, said
    assert os.listdir(folder) == [], "something was started"


@pytest.mark.parametrize("library", [1, 10, 30, 50])
def test_a_daemon_that_is_told_to_stop_while_it_is_being_loaded_ends_well(tmp_path, library):
    # The loader tells of each library whose constructors it calls.
    daemon = subprocess.Popen(
        [program("dmuond"), f"--socket={tmp_path}/d/d.sock"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_DEBUG": "files"},
    )
    called = (line for line in daemon.stderr if "calling init:" in line)
    for _ in range(library):
        next(called)
    daemon.terminate()
    daemon.communicate(timeout=HANGS_AFTER_S)
    assert daemon.returncode == 0


def test_a_runner_that_is_told_to_stop_at_once_has_its_daemon_end_well():
    for _ in range(5):
        runner = subprocess.Popen(
            [program("dmuonctl"), "run", "--", "sleep", "60"], stderr=subprocess.PIPE, text=True
        )
        children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
        wait_for(children.read_text)  # the daemon, which is being loaded
        runner.terminate()
        said = runner.communicate(timeout=HANGS_AFTER_S)[1]
        assert runner.returncode == 128 + signal.SIGTERM
        assert "the daemon ended" not in said, said


def test_a_command_with_flags_needs_the_two_dashes_and_is_told_so():
    done = run("dmuonctl", "run", "python3", "-c", "print('it ran')")
    assert done.returncode == 2
    assert "dmuonctl run -- python3" in done.stderr
    assert "it ran" not in done.stdout
    done = run("dmuonctl", "run", "--", "python3", "-c", "print('it ran')")
    assert (done.returncode, done.stdout) == (0, "it ran\n")
