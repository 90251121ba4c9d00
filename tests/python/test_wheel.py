"""What others install: two wheels, the client's also beside daemons of other releases.

With DMUOND_FRESH=1 what the wheels need comes from the package index into fresh environments, and
pip builds the client's as it does by default. Without it nothing is downloaded.
"""

import fnmatch
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import dmuond
import grpc
import needs
import pytest
import wheel_trainer
from core_trainer import Trainer, run
from daemons import HANGS_AFTER_S, program
from dmuond import _proto
from dmuond._proto import trainer_pb2

ROOT = Path(__file__).parents[2]
BUILD = program("dmuond").parents[1]
SOURCES = ("client/python", "proto", "tools/dev/python_protos.py", "LICENSE")
MADE = ("*_pb2.pyi", "descriptors.binpb", ".stamp", "*.egg-info", "__pycache__")
TORCH_PATIENCE_S = 1500.0
on_request = pytest.mark.skipif(
    os.environ.get("DMUOND_FRESH") != "1", reason="needs DMUOND_FRESH=1 and the network"
)


def call(
    *command: str | Path, patience_s: float = HANGS_AFTER_S, **more
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience_s, check=False, **more
    )


def succeed(*command: str | Path, **more) -> str:
    done = call(*command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, **more) -> str:
    """Not told of the checkout, whose dmuond it would take for installed."""
    return succeed(sys.executable, "-m", "pip", *arguments, env=alone(), **more)


def built(source: Path, into: Path, *options: str, **more) -> Path:
    pip("wheel", "-q", "--no-deps", *options, "-w", into, source, **more)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a wheel is built from, alone: of the rest of the repository it needs nothing."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source, copy = ROOT / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*MADE))
        else:
            shutil.copy(source, copy)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return built(
        checkout / "client/python", tmp_path_factory.mktemp("wheel"), "--no-build-isolation"
    )


def alone() -> dict[str, str]:
    """The environment of a shell that knows nothing of the checkout."""
    return {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DMUOND_"))
    }


def environment(folder: Path, wheel: Path, *others: str) -> Path:
    """The Python of a fresh environment with the wheel and others. All else is the tests' own."""
    succeed(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    pip("--python", python, "install", "-q", "--no-deps", wheel, *others)
    (installed,) = folder.glob("lib/python*/site-packages")
    (installed / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("venv"), wheel)


def train(python: Path, address: str, **more: str) -> subprocess.CompletedProcess[str]:
    return call(python, Path(wheel_trainer.__file__), address, env=alone() | more)


def contents(wheel: Path, pattern: str) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if re.search(pattern, name)}


def test_wheel_has_every_module_and_the_descriptors(wheel):
    package = ROOT / "client/python/src"
    kept = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.suffix in (".py", ".ptx", ".typed")
    }
    made = {
        f"dmuond/_proto/{proto.stem}_pb2.pyi"
        for proto in (ROOT / "proto/dmuond/v1").glob("*.proto")
    }
    assert set(contents(wheel, r"^dmuond/")) == kept | made | {"dmuond/_proto/descriptors.binpb"}
    (licence,) = contents(wheel, r"\.dist-info/licenses/").values()
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_wheel_in_an_environment_of_its_own_trains_as_the_checkout_does(python, address):
    done = train(python, address)
    assert done.returncode == 0, done.stderr
    where, weights = done.stdout.splitlines()
    assert where.startswith(str(python.parents[1]))
    ours, _, _ = run(Trainer(0, 1, wheel_trainer.JOB, address=address, resume="discard"))
    assert weights == " ".join(weight.tobytes().hex() for weight in ours)


def test_source_distribution_builds_the_same_wheel(checkout, wheel, tmp_path):
    script = (
        "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    )
    succeed(sys.executable, "-c", script, tmp_path, cwd=checkout / "client/python")
    (archive,) = tmp_path.glob("dmuond-*.tar.gz")
    again = built(archive, tmp_path / "again", "--no-build-isolation")
    shipped = "^dmuond/|/licenses/"
    assert contents(again, shipped) == contents(wheel, shipped)


# The oldest of each that pyproject.toml takes, here; on request those between, too. The tests'
# own environment has the newest.
OLDEST = ("grpcio==1.62.*", "protobuf==4.25.*")
OTHERS = [("grpcio==1.66.*", "protobuf==5.29.*"), ("grpcio==1.75.*", "protobuf==6.*")]


@pytest.mark.parametrize(
    "versions", [OLDEST, *(pytest.param(versions, marks=on_request) for versions in OTHERS)]
)
def test_wheel_trains_with_other_versions_of_grpcio_and_protobuf(
    wheel, address, versions, tmp_path
):
    python = environment(tmp_path / "venv", wheel, *versions)
    found = succeed(python, "-c", "import grpc, google.protobuf as p; print(p.__version__)")
    assert found.startswith(versions[1].split("==")[1].rstrip("*"))
    done = train(python, address)
    assert done.returncode == 0, done.stderr


# --- beside a daemon of another release ---


@pytest.fixture
def client(wheel, python, address, tmp_path):
    """Trains with another client: one of the wheel's modules has another text in one place."""

    def run(module: str, before: str, after: str) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
        changed = tmp_path / "dmuond" / module
        text = changed.read_text()
        assert text.count(before) == 1
        changed.write_text(text.replace(before, after))
        return train(python, address, PYTHONPATH=str(tmp_path))

    return run


def test_client_of_another_release_trains_if_it_speaks_the_protocol(client):
    done = client("__init__.py", f'__version__ = "{dmuond.__version__}"', '__version__ = "0.1.9"')
    assert done.returncode == 0, done.stderr
    assert f" 0.1.9 dmuond {dmuond.__version__}\n" in done.stdout


def test_client_with_features_that_the_daemon_does_not_have_trains_without_them(client):
    known = "pb.FEATURE_NOT_FINITE | pb.FEATURE_CHUNKS"
    done = client("link.py", f"\nFEATURES = {known}\n", f"\nFEATURES = 1 << 63 | 8 | {known}\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "update the client"), (9, "update the daemon")]
)
def test_client_of_another_protocol_is_refused_and_told_what_to_update(client, version, remedy):
    done = client("link.py", "\nPROTOCOL_VERSION = 2\n", f"\nPROTOCOL_VERSION = {version}\n")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"speaks protocol versions {version} to {version}" in last
    assert f"speaks 2: {remedy}" in last


def test_daemon_offers_no_feature_that_it_does_not_have(address):
    options = [("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = _proto.stub(channel, "Trainer")
        hello = trainer_pb2.HelloRequest(version_min=1, version_max=9, features=2**64 - 1)
        answer = stub.Hello(hello, timeout=10)
    known = trainer_pb2.FEATURE_NOT_FINITE | trainer_pb2.FEATURE_CHUNKS
    assert (answer.version, answer.features) == (2, known)


# --- the programs ---

PROGRAMS = {"dmuond", "dmuond-lane", "dmuonctl"}
# What they take from the machine. Debian 12 and Ubuntu 24.04 have these from the start.
OF_THE_MACHINE = {
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    needs.program("patchelf", "./dev setup --all")
    folder = tmp_path_factory.mktemp("engine")
    succeed(sys.executable, ROOT / "tools/wheel/engine.py", BUILD, folder, env=alone())
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, engine, tmp_path_factory) -> Path:
    """The programs' folder of an environment with both wheels, which is all that PATH has."""
    return environment(tmp_path_factory.mktemp("both"), wheel, engine).parent


def package_of(installed: Path) -> Path:
    (package,) = installed.parent.glob("lib/python*/site-packages/dmuond_engine")
    return package


def on_path(installed: Path) -> dict[str, str]:
    return alone() | {"PATH": str(installed)}


def test_both_wheels_are_all_that_a_training_script_needs(installed):
    script = ROOT / "client/python/examples/train.py"
    told = succeed("dmuonctl", "run", "--", "python", script, env=on_path(installed))
    assert "step 200: loss 0." in told


def test_no_python_stays_and_signals_are_as_they_were(installed):
    signals = "/bin/grep SigIgn /proc/self/status"
    script = f"/bin/readlink /proc/$PPID/exe; {signals}"
    told = succeed("dmuonctl", "run", "--", "/bin/sh", "-c", script, env=on_path(installed))
    who, ignored = told.splitlines()
    assert who == str(package_of(installed) / "bin/dmuonctl")
    assert ignored == succeed(*signals.split()).strip()


def test_engine_brings_every_library_that_a_machine_may_lack(installed):
    package = package_of(installed)
    for name in PROGRAMS:
        lines = succeed("ldd", package / "bin" / name, env=alone()).splitlines()
        found = dict(line.split()[::2] for line in lines if "=>" in line)
        others = {n: Path(path).resolve() for n, path in found.items() if n not in OF_THE_MACHINE}
        assert others == {n: package / "lib" / n for n in others}
        assert "libprotobuf.so.32" in others


def test_engine_says_what_it_is_and_for_which_machines(engine):
    assert re.fullmatch(
        r"dmuond_engine-\d+\.\d+\.\d+\+cpu-py3-none-manylinux_2_3[56]_x86_64\.whl", engine.name
    )
    (scripts,) = contents(engine, r"entry_points\.txt$").values()
    assert set(re.findall(r"^(\S+) = ", scripts.decode(), re.M)) == PROGRAMS
    assert len(contents(engine, r"data/share/man/man[18]/dmuon\w+\.[18]$")) == 2


def test_engine_has_the_licences_of_all_that_it_ships(engine):
    licences = contents(engine, r"\.dist-info/licenses/")
    names = {Path(name).name for name in licences}
    assert {"LICENSE", "NOTICE", "libgrpc29.txt", "nlohmann-json3-dev.txt", "GPL-3"} <= names
    shipped = [Path(name).name.split(".so")[0] for name in contents(engine, "^dmuond_engine/lib/")]
    notice = (ROOT / "NOTICE").read_text()
    patterns = re.findall(r"\blib[\w+*-]+", notice)
    unnamed = [n for n in shipped if not any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    assert unnamed == []


def test_bundle_of_the_wheels_tries_whole_jobs_where_it_was_carried(wheel, engine, tmp_path):
    """As tools/gpu/bundle.sh makes it, for the fake driver."""
    needs.fake_gpus()
    made, carried = tmp_path / "made", tmp_path / "carried"
    shutil.copytree(ROOT / "tests/gpu_join", made / "join")
    (made / "wheels").mkdir()
    for one in (wheel, engine):
        shutil.copy(one, made / "wheels")
    checks = made / "checks/dmuond_engine"
    programs = [BUILD / "bin" / n for n in ("dmuond-lane-fake", "fault_trainer_cuda")]
    places = ("--into", checks / "bin", "--libraries", checks / "lib", "--without", engine)
    succeed(sys.executable, ROOT / "tools/wheel/libraries.py", *places, *programs)
    assert list((checks / "lib").iterdir()) == []
    (checks / "fake_cuda").mkdir()
    for library in (BUILD / "fake_cuda").glob("*.so*"):
        shutil.copy(library, checks / "fake_cuda")
    made.rename(carried)
    asked = ("equal", "--fake", "--gpus=1", "--mps=off", "--steps=20", f"--out={tmp_path}")
    for _ in range(2):  # it is unpacked anew
        succeed(sys.executable, carried / "join", *asked, env=alone(), cwd="/")


@pytest.fixture
def libraries(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/wheel")
    return importlib.import_module("libraries")


@pytest.mark.parametrize(
    ("needed", "release"),
    [
        ("GLIBC_2.2.5 GLIBC_2.4", (2, 35)),
        ("GLIBC_2.36 GLIBCXX_3.4.30 CXXABI_1.3.13 GCC_3.0", (2, 36)),
        ("GLIBC_2.34 GLIBCXX_3.4.9 GLIBCXX_3.4.32", (2, 39)),
        ("GLIBC_2.34 GLIBCXX_3.4.99", None),
    ],
)
def test_versions_of_symbols_say_the_oldest_release(libraries, monkeypatch, needed, release):
    lines = "".join(f"  0x0010:   Name: {name}  Flags: none\n" for name in needed.split())
    monkeypatch.setattr(libraries, "run", lambda *_: lines)
    if release:
        assert libraries.c_library(Path("some")) == release
    else:
        with pytest.raises(SystemExit, match="some needs .*3, 4, 99.*: add it"):
            libraries.c_library(Path("some"))


def test_programs_are_collected_with_their_libraries_in_a_folder_among_them(libraries, tmp_path):
    needs.program("patchelf", "./dev setup --all")
    tool = Path(shutil.which("readelf"))
    found = libraries.collect([tool], tmp_path, tmp_path / "lib")
    assert {file.name for file in libraries.files_in(tmp_path / "lib")} == set(found) != set()
    assert libraries.files_in(tmp_path) == [tmp_path / "readelf"]
    loaded = libraries.find(tmp_path / "readelf")
    assert loaded == {name: tmp_path / "lib" / name for name in found}


def test_library_that_is_not_here_is_named(libraries, monkeypatch):
    monkeypatch.setattr(libraries, "run", lambda *_: "\tlibgrpc.so.29 => not found\n")
    with pytest.raises(SystemExit, match=r"some needs libgrpc\.so\.29, which is not here"):
        libraries.find(Path("some"))


@pytest.mark.usefixtures("libraries")
def test_what_has_no_licence_is_not_shipped(tmp_path):
    engine = importlib.import_module("engine")
    own, debians = tmp_path / "libown.so.1", Path("/lib/x86_64-linux-gnu/libc.so.6")
    own.touch()
    assert engine.packages_of([debians]) == {"libc6"}
    with pytest.raises(SystemExit, match=r"no package of Debian has .*libown\.so\.1"):
        engine.packages_of([debians, own])
    with pytest.raises(SystemExit, match="the licence of CUDA's runtime is neither"):
        engine.cuda_licence(tmp_path)
    (tmp_path / "EULA.txt").touch()
    assert engine.cuda_licence(tmp_path) == tmp_path / "EULA.txt"


# --- from the package index ---


@on_request
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_wheel_trains_with_each_python(wheel, address, version, tmp_path):
    python = tmp_path / "venv/bin/python"
    if (interpreter := shutil.which(f"python{version}")) is None:
        pytest.skip(f"needs python{version} on PATH")
    succeed(interpreter, "-m", "venv", "--without-pip", tmp_path / "venv")
    pip("--python", python, "install", "-q", wheel)
    done = train(python, address)
    assert done.returncode == 0, done.stderr


@on_request
@pytest.mark.timeout(TORCH_PATIENCE_S)
def test_wheels_are_all_that_a_bare_debian_needs_beside_python(wheel, engine, tmp_path):
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for one in (wheel, engine):
        shutil.copy(one, wheels)
    script = ROOT / "tests/deploy/bare_root.sh"
    told = succeed(script, wheels, BUILD, sys.executable, tmp_path, patience_s=TORCH_PATIENCE_S)
    assert "step 200: loss 0." in told
    assert "on a GPU: /venv/lib/python3" in told


@on_request
def test_pip_installs_into_a_fresh_environment_and_the_demo_trains(address, tmp_path, checkout):
    succeed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    wheel = built(checkout / "client/python", tmp_path / "wheel")
    pip("--python", python, "install", "-q", f"{wheel}[torch]", patience_s=TORCH_PATIENCE_S)
    done = train(python, address)
    assert done.returncode == 0, done.stderr
    demo = [
        "-m",
        "dmuond.demo.trainer",
        "--optimizer=muon",
        "--steps=20",
        "--lr=5e-3",
        "--adamw_lr=1e-3",
    ]
    succeed(
        python, *demo, env=alone() | {"DMUOND_ADDRESS": address, "DMUOND_JOB": "demo"}, cwd=tmp_path
    )
