"""The folder that `./dev bundle --engine` makes: this one's parent, where it was carried."""

import shutil
import tempfile
import zipfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
# What PYTHONPATH has for the client, and for trainers and tests that use it.
PYTHON = BUNDLE / "python"
PROGRAMS = PYTHON / "dmuond_engine/bin"


def unpack() -> None:
    """As pip, which need not be here, would install the wheels; and the checks are laid over them.

    Each time, because a newer bundle may have been carried over an older one.
    """
    if not (BUNDLE / "wheels").exists():
        return  # this is a checkout
    with tempfile.TemporaryDirectory(dir=BUNDLE) as scratch:
        unpacked = Path(scratch) / PYTHON.name
        for wheel in (BUNDLE / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    file = Path(archive.extract(member, unpacked))
                    file.chmod(member.external_attr >> 16 & 0o777 or 0o644)
        shutil.copytree(BUNDLE / "checks", unpacked, dirs_exist_ok=True)
        shutil.rmtree(PYTHON, ignore_errors=True)
        unpacked.rename(PYTHON)
