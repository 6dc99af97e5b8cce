"""Signatures: the dependencies and results of functions and classes, read from type hints."""

import abc
import builtins
import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from lifecycle.hints.generics import class_of, filled_in, open_variables
from lifecycle.hints.keys import (
    Key,
    is_awaitable_hint,
    is_member,
    is_union,
    key_of,
    member_of,
    parse_hint,
    plain,
    type_name,
)
from lifecycle.hints.named import fields_of, is_results
from lifecycle.hints.places import has_place
from lifecycle.injection.constructors import SELF, Parameter, Part
from lifecycle.injection.ordering import orders_of

__all__ = ["Signature", "describe", "read_hints", "refused", "signature_for_type"]

_EMPTY = inspect.Parameter.empty
_NAME, _ATTRIBUTE = re.compile(r"[^\W\d]\w*"), re.compile(r"\w\s*\.\s*\w")
_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
_DISGUISES = {"__wrapped__", "__signature__"}
_USUAL = {type, abc.ABCMeta, type(typing.Protocol)}
"""Metaclasses of classes that __init__ initializes."""
_NOT_PLAIN = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_VARARGS, _VARKEYWORDS = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


class Signature(NamedTuple):
    """Dependencies and results of a constructor."""

    parameters: tuple[Parameter, ...]
    result: Key | None
    """None for an invoked function, for several results, and if it could not be read."""
    faults: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    """Several results, each provided."""


class _Argument(NamedTuple):
    """A parameter of a Python function."""

    name: str
    default: object = _EMPTY
    positional: bool = False
    stars: str = ""


def describe(call: Callable[..., object], *, invoked: bool = False, decorates: bool = False) -> Signature:
    """Read the hints of a function or class. An invoked function needs no result.

    A decorator may return a whole group, ``list[Member[T]]``.
    """
    key = call, invoked, decorates
    if not _is_module_level(call):
        return _described(*key)
    if (signature := _signatures.get(key)) is None:
        signature = _described(*key)
        if not signature.faults:
            _signatures[key] = signature
    return signature


_signatures: dict[tuple[object, bool, bool], Signature] = {}
"""Signatures of functions and classes of modules, for hives that are built many times, as in tests."""


def _is_module_level(call: object) -> bool:
    """Whether a function or class is defined in a module, and so lives as long as the process."""
    return isinstance(call, types.FunctionType | type) and "<locals>" not in call.__qualname__


def _described(call: Callable[..., object], invoked: bool, decorates: bool) -> Signature:
    if not has_place(call):
        return Signature((), None, (_why_unreadable(call),))
    kind = class_of(call)
    result: Key | None = None if kind is None or invoked else key_of(call)
    parts: tuple[Part, ...] = ()
    faults = list(_refusals(call) if kind is None else _class_refusals(kind))
    if faults and kind is not None:
        return Signature((), result, tuple(faults))
    of_result: list[str] = []
    try:
        hints = read_hints(call, kind)
        parameters = _parameters(_arguments(call, kind), hints, invoked, faults)
        parameters += _orders(orders_of(kind or call), faults)
        if kind is None and not invoked:
            result, parts = _result(hints, decorates, of_result)
    except NameError as error:
        text = f"its type hint names {error.name}, which is not defined where it is written"
        return Signature((), result, (f"{text}: import it outside of `if TYPE_CHECKING`, at module level",))
    except (TypeError, ValueError, RecursionError) as error:
        endless = "a hint is an alias that contains itself; name a class instead"
        why = endless if isinstance(error, RecursionError) else error
        return Signature((), result, (f"its parameters cannot be read: {why}",))
    if any("context manager" in fault for fault in faults):
        return Signature(parameters, None, tuple(faults))
    if not any("async" in fault or "generator" in fault for fault in faults):
        faults += of_result
    return Signature(parameters, result, tuple(faults), parts)


def _why_unreadable(call: object) -> str:
    if callable(call):
        try:
            inspect.signature(call)
        except (TypeError, ValueError) as error:  # such as a partial with too many arguments
            return f"its parameters cannot be read: {error}"
    return f"{call!r} is neither a function nor a class"


def signature_for_type(hint: object) -> Signature:
    """Return the signature of a function with one ignored dependency."""
    faults: list[str] = []
    parameter = _parameter(_Argument("instance"), hint, faults)
    return Signature((parameter,) if parameter else (), None, tuple(faults))


def _refusals(call: Callable[..., object]) -> Iterator[str]:
    code = getattr(call, "__code__", None)
    if code is not None and code.co_filename == contextlib.__file__ and hasattr(call, "__wrapped__"):
        yield "it is a context manager: return the object, and enter and leave in a hook (Lifecycle.enter)"
        return
    if code is None or not code.co_flags & _NOT_PLAIN:
        return
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        yield "it is async: constructors only build objects; do the work in a hook (Lifecycle.append)"
    elif inspect.isgeneratorfunction(call):
        yield "it is a generator: return the object, and clean up in a hook (Lifecycle.enter)"


def _class_refusals(kind: type) -> Iterator[str]:
    if is_results(kind):
        yield "it is a @results class: provide the function that returns it"
    elif is_awaitable_hint(kind):
        yield "its instances are awaitable: constructors return objects that need no await"
    elif getattr(kind, "_is_protocol", False):
        yield f"it is a Protocol: provide a class that has its methods, by a function `-> {kind.__name__}`"
    elif left := sorted(getattr(kind, "__abstractmethods__", ())):
        yield f"it is abstract, without {', '.join(left)}: provide a class that derives from it"


def read_hints(call: Any, kind: type | None) -> dict[str, Any]:
    """Return the hints of the parameters and, for a function, of the result."""
    if kind is None:
        hints = _hints_of(call)
        if hints.get("return") is typing.Self:  # a classmethod's
            return hints | {"return": getattr(call, "__self__", typing.Self)}
        return hints
    if "__signature__" in vars(kind) and "__annotations__" in vars(kind):  # a pydantic model
        return _hints_of_fields(kind)
    if issubclass(kind, msgspec.Struct) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return filled_in(_evaluated(kind), call, kind)
    hints = {}
    for name in ("__new__", "__init__"):
        if name == "__new__" and kind.__new__ is object.__new__:  # fast path
            continue
        function, owner = _method(kind, name)
        if isinstance(function, types.FunctionType):
            hints |= filled_in(_hints_of(function, owner), call, owner)
    return hints


def _hints_of_fields(kind: type) -> dict[str, Any]:
    """Hints of a class with a parameter for each field; an alias renames the parameter."""
    hints = _evaluated(kind)
    for name, parameter in inspect.signature(kind).parameters.items():
        if name not in hints and not isinstance(parameter.annotation, str):
            hints[name] = parameter.annotation
    return hints


def _method(kind: type, name: str) -> tuple[object, type]:
    """Return the method that makes instances, and its class.

    Skips the __init__ that typing adds to a Protocol.
    """
    for base in kind.__mro__:
        method = vars(base).get(name)
        if method is not None and getattr(method, "__module__", None) != "typing":
            return getattr(method, "__func__", method), base
    raise AssertionError(f"object has {name}")


def _hints_of(function: Any, owner: type | None = None) -> dict[str, Any]:
    """As typing.get_type_hints(), but faster for hints that are a class or the name of one."""
    variables = _variables(owner, function)
    hints: dict[str, Any] = function.__annotations__ if hasattr(function, "__annotations__") else {}
    resolved: dict[str, Any] = {}
    unresolved = {}
    for name, hint in hints.items():
        resolved[name] = kind = hint if isinstance(hint, type) else _class_named(hint, function)
        if kind is None or hint in variables:
            unresolved[name] = hint
    if not unresolved:
        return resolved
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return _evaluated(function, variables)
    if variables:
        return resolved | _evaluated(_with_hints(function, unresolved), variables)
    return resolved | {name: _evaluated_once(hint, function) for name, hint in unresolved.items()}


def _evaluated_once(hint: object, function: types.FunctionType) -> object:
    """Return the value of a hint; ``Table[int, Device]`` in many functions is evaluated once."""
    if not isinstance(hint, str) or _ATTRIBUTE.search(hint):  # attributes of a module may be replaced
        return _evaluated(_with_hints(function, {"it": hint}))["it"]
    named = [function.__globals__.get(name, _EMPTY) for name in _names_in(hint)]
    key = (hint, *map(id, named))
    if (cached := _meanings.get(key)) is None:
        cached = _meanings[key] = _evaluated(_with_hints(function, {"it": hint}))["it"], named
    return cached[0]


_meanings: dict[tuple[object, ...], tuple[object, list[object]]] = {}
"""(text of a hint, ids of the values of its names) -> evaluated hint; it references the values."""


@functools.cache
def _names_in(hint: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_NAME.findall(hint)))


def _with_hints(function: types.FunctionType, hints: dict[str, Any]) -> types.FunctionType:
    """Return a function of the same module with only these hints."""
    carrier = types.FunctionType(_nothing.__code__, function.__globals__)
    carrier.__annotations__ = hints
    return carrier


def _nothing() -> None:
    """A body for functions that only have hints to evaluate."""


def _evaluated(call: Any, variables: dict[str, Any] | None = None) -> dict[str, Any]:
    return typing.get_type_hints(call, localns=variables or None, include_extras=True)


def _variables(*owners: Any) -> dict[str, Any]:
    """Return the type variables in brackets, ``class Box[T]``, which hide names of the module. Source: PEP
    695.
    """
    return {
        variable.__name__: variable for owner in owners for variable in getattr(owner, "__type_params__", ())
    }


def _class_named(hint: object, function: Any) -> type | None:
    """Return the class that a postponed hint names, if it is a plain name; evaluating these is slow."""
    names = getattr(function, "__globals__", None)
    if not isinstance(hint, str) or names is None or hasattr(function, "__wrapped__"):
        return None
    if hint == "None":
        return type(None)
    value = names.get(hint, vars(builtins).get(hint))
    return value if isinstance(value, type) else None


def _arguments(call: Any, kind: type | None) -> list[_Argument]:
    """As inspect.signature(), but faster for plain functions and classes with a plain __init__."""
    function = call
    if kind is not None:
        is_usual = type(kind) in _USUAL and getattr(kind, "__new__", None) is object.__new__
        function = _method(kind, "__init__")[0] if is_usual and "__signature__" not in vars(kind) else None
        if function is object.__init__:
            return []
    if isinstance(function, types.FunctionType) and not function.__dict__.keys() & _DISGUISES:
        return list(_plain_arguments(function))[kind is not None :]
    return [
        _Argument(
            parameter.name,
            parameter.default,
            parameter.kind is parameter.POSITIONAL_ONLY,
            _STARS.get(parameter.kind.name, ""),
        )
        for parameter in inspect.signature(call if kind is None else kind).parameters.values()
    ]


def _plain_arguments(function: types.FunctionType) -> Iterator[_Argument]:
    code = function.__code__
    names = code.co_varnames
    positional, keyword = code.co_argcount, code.co_kwonlyargcount
    defaults, keyword_defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
    first_default = positional - len(defaults)
    for number, name in enumerate(names[:positional]):
        default = defaults[number - first_default] if number >= first_default else _EMPTY
        yield _Argument(name, default, number < code.co_posonlyargcount)
    stars = positional + keyword
    if code.co_flags & _VARARGS:
        yield _Argument(names[stars], stars="*")
        stars += 1
    for name in names[positional : positional + keyword]:
        yield _Argument(name, keyword_defaults.get(name, _EMPTY))
    if code.co_flags & _VARKEYWORDS:
        yield _Argument(names[stars], stars="**")


def _parameters(
    arguments: Iterable[_Argument], hints: dict[str, Any], invoked: bool, faults: list[str]
) -> tuple[Parameter, ...]:
    parameters: list[Parameter | None] = []
    for argument in arguments:
        name, default, _, stars = argument
        if stars:
            faults.append(f"{stars}{name} cannot be filled: name each dependency as a parameter of its own")
        elif name in hints:
            parameters.append(_parameter(argument, hints[name], faults))
        elif invoked and name == "self" and not parameters:
            parameters.append(Parameter("self", SELF, positional=True))
        elif default is _EMPTY:
            faults.append(f"parameter {name!r} has no type hint: the hint names what to inject")
    return tuple(parameter for parameter in parameters if parameter is not None)


def _orders(types: tuple[object, ...], faults: list[str]) -> tuple[Parameter, ...]:
    """Return the types of after(), as parameters that are not passed."""
    parameters = [
        _parameter(_Argument(f"after {index}"), hint, faults, "in after()")
        for index, hint in enumerate(types)
    ]
    return tuple(
        msgspec.structs.replace(parameter, ordering=True) for parameter in parameters if parameter is not None
    )


def _parameter(argument: _Argument, hint: object, faults: list[str], subject: str = "") -> Parameter | None:
    name, default, positional, _ = argument
    has_default = default is not _EMPTY
    if isinstance(hint, type):  # fast path
        return Parameter(name, hint, not has_default, default, positional)
    if type(hint) is dataclasses.InitVar:
        return _parameter(argument, hint.type, faults, subject)
    request = parse_hint(hint)
    key, fault = request.key, None
    if not isinstance(key, Hashable):
        fault = " cannot be a key, it is not hashable"
    elif request.collect is None and (member := _loose_member(key)) is not None:
        member_name = type_name(member)
        prefix = "" if member is key else f": {member_name}"
        fault = f"{prefix} is one of many; ask for list[{member_name}] or tuple[{member_name}, ...]"
    elif is_union(key) and not has_default:
        fault = " is not a single type to inject"
    elif (left := open_variables(key)) and not has_default:
        fault = " " + _open(key, left)
    if fault is not None:
        faults.append(f"{subject or f'parameter {name!r}'}: {type_name(key)}{fault}")
        return None
    required = not (has_default or request.optional or request.collect)
    return Parameter(name, key, required, default, positional, request.collect)


def _loose_member(key: Key) -> Key | None:
    """Return the member in a key that is not requested as a group, or None."""
    return next((arg for arg in (key, *typing.get_args(key)) if is_member(arg)), None)


def _open(key: Key, variables: tuple[object, ...]) -> str:
    names = " and ".join(map(type_name, variables))
    return f"{'is open' if key in variables else f'leaves {names} open'}: name a type in its place"


def _result(hints: dict[str, Any], decorates: bool, faults: list[str]) -> tuple[Key | None, tuple[Part, ...]]:
    if "return" not in hints:
        faults.append("it has no result type: `-> T` names what it provides")
        return None, ()
    hint = hints["return"]
    if hint is type(None):
        faults.append("it returns None, so it provides nothing: give a result, or use invoke()")
        return None, ()
    key = key_of(hint)
    if is_results(key):
        parts = tuple(Part(name, key_of(field)) for name, field in fields_of(key).items())
    elif typing.get_origin(key) is tuple and typing.get_args(key)[1:] != (...,):
        parts = tuple(Part(number, key_of(arg)) for number, arg in enumerate(typing.get_args(key)))
    else:
        refusal = refused(key) if not decorates else _not_decorated(key)
        if refusal is not None:
            faults.append(f"it returns {type_name(key)}{refusal}")
        return (key if refusal is None else None), ()
    if not parts:
        faults.append(f"it returns {type_name(key)}, so it provides nothing: give a result, or use invoke()")
    usable = []
    for part in parts:
        position = f"[{part.at}]" if isinstance(part.at, int) else f".{part.at}"
        refusal = refused(part.key) if not decorates else _not_decorated(part.key)
        if refusal is not None:
            faults.append(f"it returns {type_name(part.key)} as {position}{refusal}")
        else:
            usable.append(part)
    return None, tuple(usable)


def _not_decorated(key: Key) -> str | None:
    """Return why a type cannot be decorated, or None; groups can be, single members cannot."""
    if is_member(key):
        return f": members are decorated together; take and return list[{type_name(key)}]"
    return None if member_of(key) is not None else refused(key)


def refused(key: Key) -> str | None:
    """Return why a type cannot be provided, or None."""
    if key is type(None):
        return ", which provides nothing"
    if isinstance(key, type) and not is_awaitable_hint(key):  # fast path
        return None
    refusal: str | None = None
    if is_awaitable_hint(key):
        refusal = ": constructors return objects that need no await"
    elif is_union(plain(key)) or not isinstance(key, Hashable):
        refusal = ", which is not a single type to provide"
    elif (member := member_of(key)) is not None:
        refusal = f": members are contributed one by one, each as {type_name(member)}"
    elif left := open_variables(key):
        refusal = ", which " + _open(key, left)
    return refusal
