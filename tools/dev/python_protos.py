"""Writes the descriptors that the Python client makes its messages of, from proto/.

Usage: python_protos.py PROTO_DIR OUTPUT_DIR. All .proto files under PROTO_DIR/dmuond/v1 become
OUTPUT_DIR/descriptors.binpb, and each one OUTPUT_DIR/NAME_pb2.pyi, for editors, which import each
other relatively. Does nothing when neither the .proto files nor the generator have changed.
"""

import hashlib
import re
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

PACKAGE = "dmuond/v1"
DESCRIPTORS = "descriptors.binpb"


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
    output_dir.mkdir(parents=True, exist_ok=True)
    for old in [*output_dir.glob("*_pb2*"), *output_dir.glob(".stamp")]:
        old.unlink()
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".protos-") as scratch:
        arguments = ["protoc", f"-I{proto_dir}", f"-I{well_known}", f"--pyi_out={scratch}"]
        arguments += [f"--descriptor_set_out={scratch}/{DESCRIPTORS}", "--include_imports"]
        if protoc.main(arguments + [str(source) for source in sources]) != 0:
            sys.exit("python_protos.py: protoc failed")
        for types in Path(scratch, PACKAGE).iterdir():
            (output_dir / types.name).write_text(make_relative(types.read_text()))
        Path(scratch, DESCRIPTORS).rename(output_dir / DESCRIPTORS)
    (output_dir / ".stamp").write_text(stamp)


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
