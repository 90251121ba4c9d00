"""Generates the Python client's message and stub modules from proto/.

Usage: python_protos.py PROTO_DIR OUTPUT_DIR. Every .proto file under PROTO_DIR/dmuond/v1 becomes
OUTPUT_DIR/NAME_pb2.py, NAME_pb2.pyi and NAME_pb2_grpc.py, which import each other relatively, so
that the generated package can live anywhere. Does nothing when neither the .proto files nor the
generator have changed.
"""

import hashlib
import re
import shutil
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

PACKAGE = "dmuond/v1"


def fingerprint(sources: list[Path]) -> str:
    digest = hashlib.sha256(metadata.version("grpcio-tools").encode())
    digest.update(Path(__file__).read_bytes())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def make_relative(text: str) -> str:
    """Turns 'from dmuond.v1 import x_pb2' into 'from . import x_pb2'."""
    return re.sub(rf"^from {PACKAGE.replace('/', '.')} import", "from . import", text, flags=re.M)


def generate(proto_dir: Path, sources: list[Path], output_dir: Path, stamp: str) -> None:
    from grpc_tools import protoc

    well_known = resources.files("grpc_tools") / "_proto"
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=".protos-") as scratch:
        arguments = ["protoc", f"-I{proto_dir}", f"-I{well_known}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(arguments + [str(source) for source in sources]) != 0:
            sys.exit("python_protos.py: protoc failed")
        package = Path(scratch, PACKAGE)
        for module in package.iterdir():
            module.write_text(make_relative(module.read_text()))
        (package / "__init__.py").write_text('"""Generated from proto/ by ./dev build."""\n')
        (package / ".stamp").write_text(stamp)
        shutil.rmtree(output_dir, ignore_errors=True)
        package.rename(output_dir)


def main(proto_dir: Path, output_dir: Path) -> None:
    sources = sorted((proto_dir / PACKAGE).glob("*.proto"))
    if not sources:
        return
    stamp_file = output_dir / ".stamp"
    stamp = fingerprint(sources)
    if not stamp_file.exists() or stamp_file.read_text() != stamp:
        generate(proto_dir, sources, output_dir, stamp)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
