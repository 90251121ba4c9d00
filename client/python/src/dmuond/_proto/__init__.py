"""The messages and calls of proto/dmuond/v1, made at import from their descriptors.

For each NAME.proto there is a module NAME_pb2 with its messages, enums and their values, as protoc
would generate it. Generated code demands the protobuf of its compiler or a newer one, and generated
stubs the grpcio; descriptors demand neither. `./dev build`, or the wheel's, writes
`descriptors.binpb`, and NAME_pb2.pyi for editors and type checkers.

The descriptors have a pool of their own: another release's in the same process are not in the way.
"""

import sys
from importlib import resources
from pathlib import PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

__all__ = ["calls", "full_name", "stub"]

_PACKAGE = "dmuond.v1"


def _values(enum: Any) -> dict[str, Any]:
    return {enum.name: EnumTypeWrapper(enum)} | {value.name: value.number for value in enum.values}


def _message(descriptor: Any, module: str) -> type:
    message = message_factory.GetMessageClass(descriptor)
    message.__module__ = module
    members = {nested.name: _message(nested, module) for nested in descriptor.nested_types}
    for enum in descriptor.enum_types:
        members |= _values(enum)
    for name, member in members.items():
        if not hasattr(message, name):  # protobuf's own implementations differ in what they set
            setattr(message, name, member)
    return message


def _load() -> tuple[descriptor_pool.DescriptorPool, dict[str, ModuleType]]:
    files = descriptor_pb2.FileDescriptorSet.FromString(
        resources.files(__name__).joinpath("descriptors.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # protoc has sorted them: each after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    modules = {}
    for file in files.file:
        name = PurePosixPath(file.name).stem + "_pb2"
        module = modules[name] = ModuleType(f"{__name__}.{name}", f"Of proto/{file.name}.")
        module.DESCRIPTOR = pool.FindFileByName(file.name)
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            vars(module).update(_values(enum))
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            setattr(module, descriptor.name, _message(descriptor, module.__name__))
        sys.modules[module.__name__] = module
    return pool, modules


def calls(service: str) -> dict[str, tuple[str, type, type]]:
    """Of each call of a service its kind, as grpcio names it, its request and its answer."""
    sides = {False: "unary", True: "stream"}
    return {
        call.name: (
            f"{sides[call.client_streaming]}_{sides[call.server_streaming]}",
            message_factory.GetMessageClass(call.input_type),
            message_factory.GetMessageClass(call.output_type),
        )
        for call in _pool.FindServiceByName(full_name(service)).methods
    }


def full_name(service: str) -> str:
    return f"{_PACKAGE}.{service}"


def stub(channel: Any, service: str) -> Any:
    """Calls a service through a `grpc.Channel`: has an attribute for each of its calls."""
    return SimpleNamespace(
        **{
            name: getattr(channel, kind)(
                f"/{full_name(service)}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=answer.FromString,
            )
            for name, (kind, request, answer) in calls(service).items()
        }
    )


_pool, _modules = _load()
globals().update(_modules)
