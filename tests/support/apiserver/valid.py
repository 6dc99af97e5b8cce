"""Whether an object is what its kind declares: decoding, defaults, validation.

Gives: Validity. Source: k8s.io/apiserver/pkg/registry/rest/create.go, apiextensions-apiserver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.apiserver import errors
from tests.support.apiserver.call import Call
from tests.support.apiserver.errors import FieldError, Obj, StatusError
from tests.support.apiserver.rules import immutable_errors, value_errors
from tests.support.apiserver.structural import fill_defaults, prune, schema_errors

if TYPE_CHECKING:
    from tests.support.apiserver.server import ApiServer


class Validity:
    """Decodes the objects of writes and refuses invalid ones."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def typed(self, call: Call, body: Obj, *, patched: bool = False) -> Obj:
        """The object as its kind declares it, with defaults; warnings of what was dropped."""
        from tests.support.apiserver.decode import decode

        kind = call.kind
        unknown: list[str] = []
        if kind.custom is None:
            obj, unknown = decode(body, kind.type, kind.kind, kind.version)
            for name, value in kind.strategy.empty.items():
                obj.setdefault(name, _copy(value))
            obj = {**obj, "kind": kind.kind, "apiVersion": kind.api_version}
            kind.strategy.defaults(obj)
        else:
            metadata = decode(
                {"metadata": body.get("metadata") or {}}, _METADATA_ONLY, kind.kind, kind.version
            )
            pruned = prune(
                {key: value for key, value in body.items() if key != "metadata"}, kind.type, "", unknown
            )
            unknown = metadata.unknown + unknown
            obj = fill_defaults(pruned, kind.type)
            obj = {**obj, "metadata": metadata.obj.get("metadata", {})}
        if unknown and call.strict == "Strict":
            raise self._strict(call, obj, unknown)
        if call.strict != "Ignore":
            call.warnings += [f'unknown field "{one}"' for one in sorted(unknown)]
        return obj

    def _strict(self, call: Call, obj: Obj, unknown: list[str]) -> StatusError:
        told = ", ".join(f'unknown field "{one}"' for one in sorted(unknown))
        message = f'{call.kind.kind} in version "{call.kind.version}" cannot be handled as a {call.kind.kind}: strict decoding error: {told}'
        return errors.bad_request(message)

    def content_errors(self, call: Call, obj: Obj, live: Obj | None = None) -> list[FieldError]:
        kind = call.kind
        if kind.custom is not None:
            found = schema_errors(obj, kind.type, "")
            if live is not None:  # what was wrong before is tolerated as long as it does not change
                before = schema_errors(live, kind.type, "")
                found = [one for one in found if one not in before]
            return found
        found = value_errors(obj, kind.resource)
        if live is None:
            return found + kind.strategy.validate(obj, self._server)
        found += immutable_errors(obj, live, kind.resource)
        return found + kind.strategy.validate_update(obj, live, self._server)

    def refuse_invalid(self, call: Call, wrong: list[FieldError], obj: Obj) -> None:
        if wrong:
            name = obj.get("metadata", {}).get("name", "")
            own = call.kind.strategy.error_group
            group = call.kind.group if own is None else own
            raise errors.unprocessable(group, call.kind.kind, name, wrong)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


def _metadata_only() -> Any:
    from tests.support.apiserver.types import METADATA, Type, builtin_type

    found = Type({"type": "object", "properties": {}}, custom=True)
    found.__dict__["properties"] = {"metadata": builtin_type(METADATA)}
    return found


_METADATA_ONLY = _metadata_only()
