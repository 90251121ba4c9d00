"""Builds the package with the messages of proto/ generated into it.

The wheel asks for the versions of grpcio and protobuf that its generated code was made for, so that
pip refuses what an import would refuse. The rest of the package is described in pyproject.toml.
"""

import atexit
import importlib.util
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
# A source distribution has its own copies of what lies elsewhere in the repository.
ROOT = HERE if (HERE / "proto").is_dir() else HERE.parents[1]
PROTOS = "proto/dmuond/v1"
GENERATOR = "tools/dev/python_protos.py"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_protos", ROOT / GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs_of(generated: Path) -> list[str]:
    """Protobuf reads code that it generated from that version on and in the next major one."""
    text = (generated / "trainer_pb2.py").read_text()
    version, major = re.search(r"^# Protobuf Python Version: ((\d+)\.\S+)$", text, re.M).groups()
    grpc_version = metadata.version("grpcio-tools")
    return [f"grpcio>={grpc_version}", f"protobuf>={version},<{int(major) + 2}", "numpy"]


class BuildWithProtos(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there, ./dev build generates them in place
            into = Path(self.build_lib, "dmuond/_proto")
            shutil.copytree(GENERATED, into, ignore=shutil.ignore_patterns(".stamp"))


class SdistWithProtos(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copies = [*(ROOT / PROTOS).glob("*.proto"), ROOT / GENERATOR]
        for source in copies:
            copy = Path(base_dir, source.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)


# Nothing of an earlier build gets into this one.
scratch = tempfile.mkdtemp(prefix="dmuond-build-")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
GENERATED = Path(scratch, "_proto")
load_generator().main(ROOT / "proto", GENERATED)

setup(
    install_requires=needs_of(GENERATED),
    cmdclass={"build_py": BuildWithProtos, "sdist": SdistWithProtos},
    options={"build": {"build_base": scratch}},
)
