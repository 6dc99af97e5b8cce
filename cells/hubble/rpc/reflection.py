"""The gRPC reflection service, by which grpcurl and other clients list services and messages.

Source: grpc.reflection.v1 (also served as v1alpha), reflection.proto; responses as those of grpc-go.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, ClassVar, Final

import msgspec

from cells.hubble.codec import Wire, WireMessage, decode, encode, from_json, to_json
from cells.hubble.filters.descriptors import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ProtoFile,
    describe,
    file_descriptors,
    service,
)
from cells.hubble.rpc import messages as rpc_messages
from cells.hubble.rpc.messages import HEALTH_SERVICE, Answers, Method, Requests, RpcCode, decoded

PACKAGE: Final = "grpc.reflection.v1"
EARLIER: Final = "grpc.reflection.v1alpha"


class ReflectionRequest(WireMessage):
    """A request: the last field that is set; without any, a request for the list of services."""

    protobuf: ClassVar[str] = "grpc.reflection.v1.ServerReflectionRequest"
    host: Annotated[str, Wire(1)] = ""
    file_by_filename: Annotated[str, Wire(3, oneof="message_request")] = ""
    file_containing_symbol: Annotated[str, Wire(4, oneof="message_request")] = ""
    file_containing_extension: Annotated[ExtensionRequest | None, Wire(5, oneof="message_request")] = None
    all_extension_numbers_of_type: Annotated[str, Wire(6, oneof="message_request")] = ""
    list_services: Annotated[str, Wire(7, oneof="message_request")] = ""


class ExtensionRequest(WireMessage):
    protobuf: ClassVar[str] = "grpc.reflection.v1.ExtensionRequest"
    containing_type: Annotated[str, Wire(1)] = ""
    extension_number: Annotated[int, Wire(2, "int32")] = 0


class FileDescriptorResponse(WireMessage):
    protobuf: ClassVar[str] = "grpc.reflection.v1.FileDescriptorResponse"
    file_descriptor_proto: Annotated[Sequence[bytes], Wire(1)] = ()


class ServiceResponse(WireMessage):
    protobuf: ClassVar[str] = "grpc.reflection.v1.ServiceResponse"
    name: Annotated[str, Wire(1)] = ""


class ListServiceResponse(WireMessage):
    protobuf: ClassVar[str] = "grpc.reflection.v1.ListServiceResponse"
    service: Annotated[Sequence[ServiceResponse], Wire(1)] = ()


class ReflectionError(WireMessage):
    protobuf: ClassVar[str] = "grpc.reflection.v1.ErrorResponse"
    error_code: Annotated[int, Wire(1, "int32")] = 0
    error_message: Annotated[str, Wire(2)] = ""


class ReflectionResponse(WireMessage):
    """The response to one request."""

    protobuf: ClassVar[str] = "grpc.reflection.v1.ServerReflectionResponse"
    valid_host: Annotated[str, Wire(1)] = ""
    original_request: Annotated[ReflectionRequest | None, Wire(2)] = None
    file_descriptor_response: Annotated[FileDescriptorResponse | None, Wire(4, oneof="message_response")] = (
        None
    )
    list_services_response: Annotated[ListServiceResponse | None, Wire(6, oneof="message_response")] = None
    error_response: Annotated[ReflectionError | None, Wire(7, oneof="message_response")] = None


_WELL_KNOWN: Final[dict[str, dict[str, tuple[tuple[str, int], ...]]]] = {
    "timestamp": {"Timestamp": (("seconds", 3), ("nanos", 5))},
    "any": {"Any": (("type_url", 9), ("value", 12))},
    "field_mask": {"FieldMask": (("paths", 9),)},
    "wrappers": {
        f"{name}Value": (("value", number),)
        for name, number in (
            *(("Double", 1), ("Float", 2), ("Int64", 3), ("UInt64", 4), ("Int32", 5)),
            *(("UInt32", 13), ("Bool", 8), ("String", 9), ("Bytes", 12)),
        )
    },
}
"""Field names and types of messages in google/protobuf, for their descriptors."""


def _well_known() -> Iterator[FileDescriptorProto]:
    for file, messages in _WELL_KNOWN.items():
        described = [
            DescriptorProto(
                name=name,
                field=[
                    FieldDescriptorProto(
                        name=field, number=place, label=3 if field == "paths" else 1, type=kind
                    )
                    for place, (field, kind) in enumerate(fields, 1)
                ],
            )
            for name, fields in messages.items()
        ]
        name = f"google/protobuf/{file}.proto"
        yield FileDescriptorProto(
            name=name, package="google.protobuf", message_type=described, syntax="proto3"
        )


def _own_files() -> Iterator[FileDescriptorProto]:
    """Describe the health service and this service, under both of its names."""
    package, _, name = HEALTH_SERVICE.rpartition(".")
    checks = service(
        package,
        name,
        ("Check", "HealthCheckRequest", "HealthCheckResponse", False),
        ("Watch", "HealthCheckRequest", "HealthCheckResponse", True),
    )
    yield describe(
        ProtoFile("grpc/health/v1/health.proto", package, (), rpc_messages, rpc_messages, (checks,))
    )
    here = sys.modules[__name__]
    info = service(
        PACKAGE,
        "ServerReflection",
        ("ServerReflectionInfo", "ServerReflectionRequest", "ServerReflectionResponse", True),
    )
    (method,) = info.method
    info = msgspec.structs.replace(info, method=[msgspec.structs.replace(method, client_streaming=True)])
    file = describe(ProtoFile("grpc/reflection/v1/reflection.proto", PACKAGE, (), here, here, (info,)))
    yield file
    text = msgspec.json.encode(to_json(file)).decode()
    for now, before in ((PACKAGE, EARLIER), (PACKAGE.replace(".", "/"), EARLIER.replace(".", "/"))):
        text = text.replace(now, before)
    yield from_json(FileDescriptorProto, msgspec.json.decode(text))


class _Files:
    """File descriptors by name, and by the symbols that they define."""

    def __init__(self) -> None:
        hubble = [decode(FileDescriptorProto, each) for each in file_descriptors()]
        self._by_name = {file.name: file for file in (*_well_known(), *hubble, *_own_files())}
        self._by_symbol = {symbol: file for file in self._by_name.values() for symbol in _symbols(file)}

    def named(self, name: str) -> FileDescriptorProto | None:
        return self._by_name.get(name)

    def with_symbol(self, symbol: str) -> FileDescriptorProto | None:
        return self._by_symbol.get(symbol)

    def with_dependencies(self, file: FileDescriptorProto, sent: set[str]) -> Iterator[bytes]:
        """Return the file and its dependencies, except those already sent on this stream."""
        waiting = [file.name]
        while waiting:
            name = waiting.pop(0)
            if name in sent and name != file.name:
                continue
            sent.add(name)
            yield encode(self._by_name[name])
            waiting += [one for one in self._by_name[name].dependency if one not in {*sent, *waiting}]


_files = cache(_Files)


def _symbols(file: FileDescriptorProto) -> Iterator[str]:
    for each in file.service:
        yield f"{file.package}.{each.name}"
        yield from (f"{file.package}.{each.name}.{method.name}" for method in each.method)
    yield from (f"{file.package}.{each.name}" for each in file.enum_type)
    for message in file.message_type:
        yield from _of_message(file.package, message)


def _of_message(scope: str, message: DescriptorProto) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield name
    yield from (f"{name}.{field.name}" for field in message.field)
    yield from (f"{name}.{enum.name}" for enum in message.enum_type)
    for nested in message.nested_type:
        yield from _of_message(name, nested)


def reflection_methods(services: Iterable[str]) -> list[Method]:
    """Return the methods of the reflection service, under both names, for these services."""
    names = sorted({*services, *(f"{package}.ServerReflection" for package in (PACKAGE, EARLIER))})

    async def info(requests: Requests) -> Answers:
        sent: set[str] = set()
        async for data in requests:
            yield [encode(_answer(decoded(ReflectionRequest, data), names, sent))]

    return [
        Method(f"{package}.ServerReflection", "ServerReflectionInfo", info, "bidi_stream")
        for package in (PACKAGE, EARLIER)
    ]


def _answer(request: ReflectionRequest, services: Sequence[str], sent: set[str]) -> ReflectionResponse:
    answer = ReflectionResponse(valid_host=request.host, original_request=request)
    files = _files()
    if request.file_containing_extension is not None or request.all_extension_numbers_of_type:
        return msgspec.structs.replace(answer, error_response=_not_found("extensions: there are none"))
    if name := request.file_by_filename:
        file = files.named(name)
    elif name := request.file_containing_symbol:
        file = files.with_symbol(name)
    else:
        found = ListServiceResponse(service=[ServiceResponse(name=one) for one in services])
        return msgspec.structs.replace(answer, list_services_response=found)
    if file is None:
        return msgspec.structs.replace(answer, error_response=_not_found(f"{name}: not found"))
    described = FileDescriptorResponse(file_descriptor_proto=list(files.with_dependencies(file, sent)))
    return msgspec.structs.replace(answer, file_descriptor_response=described)


def _not_found(text: str) -> ReflectionError:
    return ReflectionError(error_code=RpcCode.NOT_FOUND, error_message=text)
