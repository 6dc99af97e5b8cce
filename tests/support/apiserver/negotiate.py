"""What form an answer takes: JSON or YAML, whole objects, only metadata, or a table.

Gives: Form, negotiate, rendered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from tests.support.apiserver.errors import Obj, StatusError
from tests.support.apiserver.wire import Request, encode

JSON, YAML, PROTOBUF = "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"
KNOWN = (JSON, YAML, PROTOBUF)
META = "meta.k8s.io"


class Form(NamedTuple):
    """The form that was agreed on."""

    media: str = JSON
    shape: str = ""
    version: str = "v1"
    """``Table``, ``PartialObjectMetadata``, ``PartialObjectMetadataList`` or nothing."""


def not_acceptable(*, custom: bool, watch: bool = False) -> StatusError:
    """406 in the words of the handlers, or of the router in front of those of built-in kinds."""
    listed = ", ".join(KNOWN)
    if custom:
        if watch:
            listed = f"{JSON};stream=watch, {PROTOBUF};stream=watch"
        return StatusError(406, "NotAcceptable", f"only the following media types are accepted: {listed}")
    if watch:
        listed += f", {JSON};stream=watch, {PROTOBUF};stream=watch"
    return StatusError(
        406, "NotAcceptable", f"406: Not Acceptable\n\nAvailable representations: {listed}", {}
    )


def negotiate(
    request: Request, *, custom: bool, watch: bool = False, shapes: bool = True, aggregated: bool = False
) -> Form:
    """The first form of the Accept header that can be made. Raises StatusError 406."""
    accept = request.header("Accept").strip()
    if not accept:
        return Form()
    routed = False
    for clause in accept.split(","):
        media, parameters = _clause(clause)
        if media == "*/*":
            return Form()
        if media not in KNOWN:
            continue
        routed = True
        if media == PROTOBUF or (media == YAML and watch):
            continue  # protobuf is not spoken here
        shape = parameters.get("as", "")
        if not shape:
            return Form(media)
        if aggregated and shape == "APIGroupDiscoveryList" and parameters.get("v") == "v2":
            return Form(media, shape)
        if shapes and _shape_known(shape, parameters):
            return Form(media, shape, parameters.get("v", "v1"))
    raise not_acceptable(custom=custom or routed, watch=watch)


def _shape_known(shape: str, parameters: dict[str, str]) -> bool:
    if parameters.get("g") != META:
        return False
    if shape == "Table":
        return parameters.get("v") in {"v1", "v1beta1"}
    return shape in {"PartialObjectMetadata", "PartialObjectMetadataList"} and parameters.get("v") == "v1"


def _clause(text: str) -> tuple[str, dict[str, str]]:
    media, *rest = [part.strip() for part in text.split(";")]
    return media, dict(part.split("=", 1) for part in rest if "=" in part)


class _Dumper(yaml.SafeDumper):
    pass


def rendered(body: Any, media: str) -> bytes:
    """The bytes of an answer."""
    if media == YAML:
        return yaml.dump(
            body, Dumper=_Dumper, default_flow_style=False, sort_keys=True, allow_unicode=True
        ).encode()
    return encode(body)


def metadata_only(obj: Obj, version: str = "v1") -> Obj:
    """As PartialObjectMetadata."""
    return {"kind": "PartialObjectMetadata", "apiVersion": f"{META}/{version}", "metadata": obj["metadata"]}


def metadata_list(listed: Obj) -> Obj:
    """A list as PartialObjectMetadataList."""
    items = [metadata_only(one) for one in listed["items"]]
    metadata = {key: value for key, value in listed["metadata"].items() if value != ""}
    return {
        "kind": "PartialObjectMetadataList",
        "apiVersion": f"{META}/v1",
        "metadata": metadata,
        "items": items,
    }
