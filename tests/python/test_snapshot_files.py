"""Snapshot files are safetensors files, and dmuonctl says whether they are whole."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from daemons import program
from safetensors import safe_open
from safetensors.numpy import load_file

STEP = 1200
KINDS = {"master": 1, "momentum": 2, "exp_avg": 3, "exp_avg_sq": 4}
SHAPES = {
    "layers.0.attention/wq": (6, 10),
    "layers.0.mlp": (12, 7),
    "experts": (3, 4, 5),
    "norm": (13,),
    "embedding": (11, 3),
    "temperature": (),
}


def expected(parameter: str, kind: str) -> np.ndarray:
    """What tests/server/storage/snapshots.cc writes."""
    shape = SHAPES[parameter]
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    base = (STEP * 31 + list(SHAPES).index(parameter) * 13 + KINDS[kind] * 7) * 1000
    return ((base + index) % 65521).astype(np.float32)


def write_snapshot(directory: Path, step: int = STEP) -> Path:
    directory.mkdir(exist_ok=True)
    command = [program("write_snapshot"), directory, str(step), "3", "1", "2"]
    subprocess.run(command, check=True)
    return directory / "run7" / f"step-{step:012d}.1.{step}"


def snapshot(*arguments: object) -> subprocess.CompletedProcess:
    command = [program("dmuonctl"), "snapshot", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_library_reads_every_tensor(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path)
    state = {kind: {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
             for kind in KINDS}  # fmt: skip
    updates = {}
    for file in sorted(folder.glob("lane-*.safetensors")):
        for name, tensor in load_file(file).items():
            parameter, _, rest = name.rpartition("/")
            kind, _, box = rest.partition("[")
            ranges = [range_.split(":") for range_ in box.rstrip("]").split(",") if box]
            where = tuple(slice(int(begin), int(end)) for begin, end in ranges)
            if kind == "updates":
                assert tensor.dtype == np.int64 and tensor.shape == ()
                updates[parameter] = int(tensor)
            else:
                assert tensor.dtype == np.float32
                state[kind][parameter][where or ...] = tensor
    matrices = ["layers.0.attention/wq", "layers.0.mlp", "experts"]
    for index, parameter in enumerate(SHAPES):
        assert updates[parameter] == STEP - index % 3
        kinds = ["momentum"] if parameter in matrices else ["exp_avg", "exp_avg_sq"]
        for kind in [*kinds, "master"]:
            np.testing.assert_array_equal(state[kind][parameter], expected(parameter, kind))


def test_torch_reads_them_too_and_finds_the_metadata(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path)
    with safe_open(folder / "lane-00000.safetensors", framework="pt") as file:
        assert file.metadata()["job"] == "run7"
        assert file.metadata()["step"] == str(STEP)
        for name in file.keys():  # noqa: SIM118 (no mapping)
            assert file.get_tensor(name).isfinite().all()
    with safe_open(folder / "trainers-00000.safetensors", framework="pt") as file:
        state = bytes(file.get_tensor("trainer_state/2").tolist())
        assert state == b"rank 2 after step 1200\0\0"


def test_the_manifest_is_json(tmp_path: Path) -> None:
    manifest = json.loads((write_snapshot(tmp_path) / "manifest.json").read_text())
    assert manifest["step"] == str(STEP)
    assert [file["name"] for file in manifest["files"]] == [
        "lane-00000.safetensors",
        "lane-00001.safetensors",
        "trainers-00000.safetensors",
    ]
    assert {entry["name"] for entry in manifest["parameters"]} == set(SHAPES)


def test_list_and_verify(tmp_path: Path) -> None:
    write_snapshot(tmp_path)
    second = write_snapshot(tmp_path, 1300)
    listed = json.loads(snapshot("list", tmp_path, "--json").stdout)
    assert [(entry["step"], entry["state"]) for entry in listed] == [
        (1300, "durable"),
        (1200, "durable"),
    ]
    assert "1300" in snapshot("list", tmp_path, "run7").stdout
    whole = snapshot("verify", tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("whole") == 2

    file = second / "lane-00001.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    verified = snapshot("verify", tmp_path, "run7", 1300)
    assert verified.returncode == 1
    assert str(file) in verified.stdout and "checksum" in verified.stdout
    assert snapshot("verify", tmp_path, "run7", 1200).returncode == 0

    file.write_bytes(damaged[:-1])
    listed = json.loads(snapshot("list", tmp_path, "--json").stdout)
    assert listed[0]["state"] == "broken"
    assert str(file) in listed[0]["problem"]


def test_verify_of_what_is_not_there(tmp_path: Path) -> None:
    assert snapshot("list", tmp_path).stdout == "no snapshot\n"
    assert snapshot("verify", tmp_path, "run7").returncode == 1
    missing = snapshot("list", tmp_path / "none")
    assert missing.returncode == 1
    assert "none" in missing.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["list"], ["remove", "x"], ["list", "a", "b", "3"], ["verify", "a", "b", "c"]]
)
def test_wrong_commands(arguments: list[str]) -> None:
    assert snapshot(*arguments).returncode == 2
