"""Protobuf descriptors of Hubble's messages and services, for reflection and for CEL filters.

CEL (Common Expression Language) filters, in which the flow is named ``_flow``, need the Python packages
cel-expr-python and protobuf; they are imported for the first request with such a filter.

Source: google/protobuf/descriptor.proto; Cilium 1.17, api/v1 and pkg/hubble/filters/cel.go; cel.dev.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from cells.hubble import enums, flow
from cells.hubble.codec import Wire, WireMessage, encode, members_of
from cells.hubble.filters import InvalidFilter
from cells.hubble.flow import Flow, HubbleEvent
from cells.hubble.rpc import observer
from cells.hubble.scalars import EnumType, Member, camel_case


class EnumValueDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.EnumValueDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    number: Annotated[int | None, Wire(2, "optional int32")] = None


class EnumDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.EnumDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    value: Annotated[Sequence[EnumValueDescriptorProto], Wire(2)] = ()


class FieldDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.FieldDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    number: Annotated[int, Wire(3, "int32")] = 0
    label: Annotated[int, Wire(4, "int32")] = 0
    type: Annotated[int, Wire(5, "int32")] = 0
    type_name: Annotated[str, Wire(6)] = ""
    oneof_index: Annotated[int | None, Wire(9, "optional int32")] = None
    json_name: Annotated[str, Wire(10)] = ""


class OneofDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.OneofDescriptorProto"
    name: Annotated[str, Wire(1)] = ""


class DescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.DescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    field: Annotated[Sequence[FieldDescriptorProto], Wire(2)] = ()
    nested_type: Annotated[Sequence[DescriptorProto], Wire(3)] = ()
    enum_type: Annotated[Sequence[EnumDescriptorProto], Wire(4)] = ()
    oneof_decl: Annotated[Sequence[OneofDescriptorProto], Wire(8)] = ()


class MethodDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.MethodDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    input_type: Annotated[str, Wire(2)] = ""
    output_type: Annotated[str, Wire(3)] = ""
    client_streaming: Annotated[bool, Wire(5)] = False
    server_streaming: Annotated[bool, Wire(6)] = False


class ServiceDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.ServiceDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    method: Annotated[Sequence[MethodDescriptorProto], Wire(2)] = ()


class FileDescriptorProto(WireMessage):
    protobuf: ClassVar[str] = "google.protobuf.FileDescriptorProto"
    name: Annotated[str, Wire(1)] = ""
    package: Annotated[str, Wire(2)] = ""
    dependency: Annotated[Sequence[str], Wire(3)] = ()
    message_type: Annotated[Sequence[DescriptorProto], Wire(4)] = ()
    enum_type: Annotated[Sequence[EnumDescriptorProto], Wire(5)] = ()
    service: Annotated[Sequence[ServiceDescriptorProto], Wire(6)] = ()
    syntax: Annotated[str, Wire(12)] = ""


_OPTIONAL, _REPEATED = 1, 3
_MESSAGE, _ENUM = 11, 14
_SCALARS: Final = {
    "double": 1,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
_WELL_KNOWN: Final = ("timestamp", "wrappers", "field_mask", "any")


class ProtoFile(NamedTuple):
    """A .proto file: its messages and services, and the Python modules that define them."""

    name: str
    package: str
    dependencies: tuple[str, ...]
    messages: types.ModuleType
    enums: types.ModuleType
    services: tuple[ServiceDescriptorProto, ...] = ()


def service(package: str, name: str, *methods: tuple[str, str, str, bool]) -> ServiceDescriptorProto:
    """Describe a service by its methods: request type, response type, and whether responses are streamed."""
    return ServiceDescriptorProto(
        name=name,
        method=[
            MethodDescriptorProto(
                name=method,
                input_type=f".{package}.{request}",
                output_type=f".{package}.{answer}",
                server_streaming=streaming,
            )
            for method, request, answer, streaming in methods
        ],
    )


_FILES: Final = (
    ProtoFile("flow/flow.proto", "flow", (), flow, enums),
    ProtoFile("relay/relay.proto", "relay", (), observer, observer),
    ProtoFile(
        "observer/observer.proto",
        "observer",
        ("flow/flow.proto", "relay/relay.proto"),
        observer,
        observer,
        (
            service(
                "observer",
                "Observer",
                ("GetFlows", "GetFlowsRequest", "GetFlowsResponse", True),
                ("GetAgentEvents", "GetAgentEventsRequest", "GetAgentEventsResponse", True),
                ("GetDebugEvents", "GetDebugEventsRequest", "GetDebugEventsResponse", True),
                ("GetNodes", "GetNodesRequest", "GetNodesResponse", False),
                ("GetNamespaces", "GetNamespacesRequest", "GetNamespacesResponse", False),
                ("ServerStatus", "ServerStatusRequest", "ServerStatusResponse", False),
            ),
        ),
    ),
    ProtoFile(
        "peer/peer.proto",
        "peer",
        (),
        observer,
        observer,
        (service("peer", "Peer", ("Notify", "NotifyRequest", "ChangeNotification", True)),),
    ),
)
_ENUM_SCOPES: Final = {
    "NodeState": "relay",
    "ServingStatus": "grpc.health.v1.HealthCheckResponse",
    "ChangeNotificationType": "peer",
    "TunnelProtocol": "flow.Tunnel",
}
"""The package or message that contains an enum; all other enums are in the package flow."""
_ENUM_NAMES: Final = {"FlowVerdict": "Verdict", "TunnelProtocol": "Protocol"}


def file_descriptors() -> list[bytes]:
    """Return the serialized FileDescriptorProto of each file, dependencies first."""
    return [encode(describe(each)) for each in _FILES]


def describe(file: ProtoFile) -> FileDescriptorProto:
    """Return the FileDescriptorProto of a file."""
    messages = [
        cls
        for _, cls in inspect.getmembers(file.messages, inspect.isclass)
        if issubclass(cls, WireMessage) and getattr(cls, "protobuf", "").startswith(f"{file.package}.")
    ]
    return FileDescriptorProto(
        name=file.name,
        package=file.package,
        dependency=[*(f"google/protobuf/{name}.proto" for name in _WELL_KNOWN), *file.dependencies],
        message_type=[
            _message(cls, messages, file.enums)
            for cls in messages
            if cls.protobuf.rpartition(".")[0] == file.package
        ],
        enum_type=list(_enums(file.enums, file.package)),
        service=file.services,
        syntax="proto3",
    )


def _enums(module: types.ModuleType, scope: str) -> Iterator[EnumDescriptorProto]:
    for name, cls in inspect.getmembers(module, inspect.isclass):
        if not issubclass(cls, IntEnum) or cls.__module__ != module.__name__:
            continue
        if _ENUM_SCOPES.get(name, "flow") == scope:
            values = [
                EnumValueDescriptorProto(name=value, number=int(member))
                for value, member in cls.__members__.items()
            ]
            yield EnumDescriptorProto(name=_ENUM_NAMES.get(name, name), value=values)


def _message(
    cls: type[WireMessage], all_messages: Iterable[type[WireMessage]], in_module: types.ModuleType
) -> DescriptorProto:
    members = members_of(cls)
    oneofs = list(dict.fromkeys(member.wire.oneof for member in members if member.wire.oneof))
    return DescriptorProto(
        name=cls.protobuf.rpartition(".")[2],
        field=[_field(member, oneofs) for member in members],
        nested_type=[
            _message(each, all_messages, in_module)
            for each in all_messages
            if each.protobuf.rpartition(".")[0] == cls.protobuf
        ],
        enum_type=list(_enums(in_module, cls.protobuf)),
        oneof_decl=[OneofDescriptorProto(name=name) for name in oneofs],
    )


def _field(member: Member, oneofs: Sequence[str]) -> FieldDescriptorProto:
    kind, type_name = _type(member)
    return FieldDescriptorProto(
        name=member.name,
        number=member.wire.number,
        label=_REPEATED if member.repeated else _OPTIONAL,
        type=kind,
        type_name=type_name,
        oneof_index=oneofs.index(member.wire.oneof) if member.wire.oneof else None,
        json_name=camel_case(member.name),
    )


def _type(member: Member) -> tuple[int, str]:
    """Return the descriptor type of a field, and the full name of its message or enum."""
    if isinstance(member.type, EnumType):
        name = member.type.enum.__name__
        return _ENUM, f".{_ENUM_SCOPES.get(name, 'flow')}.{_ENUM_NAMES.get(name, name)}"
    if name := member.type.message_name:
        return _MESSAGE, f".{name}"
    return _SCALARS[member.type.name], ""


# CEL filters


def compile_expressions(texts: Sequence[str]) -> Callable[[HubbleEvent], bool]:
    """Return a predicate: one of the expressions is true; an expression that fails is false.

    Raises InvalidFilter.
    """
    environment, message, types = _environment()
    expressions = []
    for text in texts:
        try:
            expression = environment.compile(text)
        except Exception as error:  # noqa: BLE001 - the library raises its own kinds and RuntimeError
            reason = str(error).removeprefix("INVALID_ARGUMENT: ").removesuffix(" [INVALID_ARGUMENT]")
            reason = re.sub(r"(undefined field '[^']*') not found in struct '[^']*'", r"\1", reason)
            raise InvalidFilter(f"error compiling CEL expression: {reason}") from None
        kind = _WRAPPERS.get(text.strip(), "") or _kind_name(expression.return_type().name())
        if kind != _kind_name(types.BOOL.name()):
            raise InvalidFilter(f'error compiling CEL expression: got "{kind}", wanted "bool" result type')
        expressions.append(expression)

    def matches(event: HubbleEvent) -> bool:
        flow = message.FromString(encode(event) if isinstance(event, Flow) else b"")
        return any(_holds(expression, flow) for expression in expressions)

    return matches


def _kind_name(name: str) -> str:
    """Return the name of a CEL type as cel-go prints it: only messages have capitals."""
    return name.lower() if name.isupper() else name


_WRAPPERS: Final = {"_flow.is_reply": "wrapper(bool)"}
"""Fields with presence: cel-expr-python takes them for a bool, cel-go does not."""


def _holds(expression: Any, flow: object) -> bool:
    try:
        return expression.eval(data={"_flow": flow}).value() is True
    except Exception:  # noqa: BLE001 - an expression that fails does not match
        return False


@cache
def _environment() -> tuple[Any, Any, Any]:
    """Return the CEL environment, protobuf's class of a flow, and the library's types."""
    try:
        from cel_expr_python import cel
        from google.protobuf import any_pb2, field_mask_pb2, message_factory, timestamp_pb2, wrappers_pb2
        from google.protobuf.descriptor_pool import DescriptorPool
    except ImportError:
        raise InvalidFilter("CEL filters need the Python package cel-expr-python") from None
    pool = DescriptorPool()
    for known in (any_pb2, field_mask_pb2, timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    for data in file_descriptors():
        pool.AddSerializedFile(data)
    environment = cel.NewEnv(
        descriptor_pool=pool, variables={"_flow": cel.Type("flow.Flow")}, container="flow"
    )
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("flow.Flow"))
    return environment, message, cel.Type
