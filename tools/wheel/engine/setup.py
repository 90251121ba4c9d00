"""What pyproject.toml cannot say of a folder that tools/wheel/engine.py has filled."""

from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

PROGRAMS = [path.name for path in sorted(Path("dmuond_engine/bin").iterdir())]


class Engine(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # it is of one architecture


class EngineWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", Path("TAG").read_text()  # of any Python


setup(
    distclass=Engine,
    cmdclass={"bdist_wheel": EngineWheel},
    entry_points={
        "console_scripts": [f"{name} = dmuond_engine:{name.replace('-', '_')}" for name in PROGRAMS]
    },
    data_files=[(str(page.parent), [str(page)]) for page in sorted(Path("share").rglob("*.[18]"))],
)
