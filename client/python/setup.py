"""Builds the package with the descriptors of proto/ in it; pyproject.toml describes the rest."""

import atexit
import importlib.util
import shutil
import tempfile
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


class BuildWithProtos(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there, ./dev build generates them in place
            into = Path(self.build_lib, "dmuond/_proto")
            shutil.copytree(
                GENERATED, into, ignore=shutil.ignore_patterns(".stamp"), dirs_exist_ok=True
            )


class SdistWithProtos(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copies = [*(ROOT / PROTOS).glob("*.proto"), ROOT / GENERATOR, ROOT / "LICENSE"]
        for source in copies:
            copy = Path(base_dir, source.relative_to(ROOT))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.unlink(missing_ok=True)  # a link's target lies elsewhere
            shutil.copy(source, copy)


# Nothing of an earlier build gets into this one.
scratch = tempfile.mkdtemp(prefix="dmuond-build-")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
GENERATED = Path(scratch, "_proto")
load_generator().main(ROOT / "proto", GENERATED)

setup(
    cmdclass={"build_py": BuildWithProtos, "sdist": SdistWithProtos},
    options={"build": {"build_base": scratch}},
)
