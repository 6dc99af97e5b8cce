"""Filters in the Common Expression Language, over a flow named ``_flow``.

Needs the Python packages cel-expr-python and protobuf; imported only for a request that has such a filter.

Source: Cilium 1.17, pkg/hubble/filters/cel.go; cel.dev.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cells.hubble.codec import encode
from cells.hubble.filters import InvalidFilter
from cells.hubble.filters.descriptors import file_descriptors
from cells.hubble.flow import Flow, HubbleEvent


def compile_expressions(texts: Sequence[str]) -> Callable[[HubbleEvent], bool]:
    """Whether one of the expressions is true; one that fails on a flow is not. Raises InvalidFilter."""
    environment, message, types = _environment()
    expressions = []
    for text in texts:
        try:
            expression = environment.compile(text)
        except Exception as error:  # noqa: BLE001 - the library raises its own kinds and RuntimeError
            raise InvalidFilter(f"error compiling CEL expression: {error}") from None
        if expression.return_type() != types.BOOL:
            kind = expression.return_type().name()
            raise InvalidFilter(f'error compiling CEL expression: got "{kind}", wanted "bool" result type')
        expressions.append(expression)

    def matches(event: HubbleEvent) -> bool:
        flow = message.FromString(encode(event) if isinstance(event, Flow) else b"")
        return any(_holds(expression, flow) for expression in expressions)

    return matches


def _holds(expression: Any, flow: object) -> bool:
    try:
        return expression.eval(data={"_flow": flow}).value() is True
    except Exception:  # noqa: BLE001 - an expression that fails does not match
        return False


@cache
def _environment() -> tuple[Any, Any, Any]:
    """The environment of expressions, protobuf's class of a flow, and the library's types."""
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
