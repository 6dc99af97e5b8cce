"""Settings from flags, environment variables and code.

An unknown flag is an error. A variable with the prefix but without an option is treated like an unknown key
of a file: logged with the nearest names, refused, or left to other programs, as the Sources are configured.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from lifecycle.settings import values
from lifecycle.settings.options import CONFIG_DIR, Option, env_name
from lifecycle.settings.raw_values import Findings, Layer, RawValue, hides, masked, unknown
from lifecycle.settings.secrets import HIDDEN

__all__ = ["by_name", "by_option", "code", "environment", "flags"]

_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Variables that Kubernetes sets in every container for each Service; one may have the name of a hive."""


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    """Return the options by each of their names."""
    return {name: option for option in options for name in option.names}


def flags(
    argv: Sequence[str],
    names: Mapping[str, Option],
    findings: Findings,
    places: Iterable[str] = (CONFIG_DIR,),
) -> Layer:
    """Parse ``--name=value``, ``--name value``, ``--name`` for a boolean; also flags that name places."""
    layer: Layer = {}
    words = deque(argv)
    while words:
        word = words.popleft()
        name, equals, text = word[2:].partition("=")
        name = name.lower()
        option = names.get(name)
        if not word.startswith("--") or word == "--":
            findings.fault(_unexpected_word(word, names))
            continue
        if option is None and name not in places:
            if not findings.part:
                findings.fault(unknown(f"--{name}", name, names, "--"))
            if not equals and words and not words[0].startswith("--"):
                words.popleft()  # its value is not reported, too
            continue
        if not equals and option is not None and values.bare(option.kind)[0] is bool:
            text = "true"
        elif not equals:
            if not words:
                findings.fault(f"--{name}: needs a value, as in --{name}=VALUE")
                continue
            text = words.popleft()
        raw: object = text
        if option is not None and (values.is_list(option.kind) or values.is_map(option.kind)):
            before = layer[name].raw if name in layer else []
            raw = [*before, text]  # type: ignore[misc]  # lists are only ever put here as lists
        layer[name] = RawValue(raw, name, f"flag --{name}", f"--{name}={masked(text, name, option)}")
    return layer


def environment(
    env: Mapping[str, str],
    prefix: str,
    names: Mapping[str, Option],
    findings: Findings,
    places: Iterable[str] = (CONFIG_DIR,),
) -> Layer:
    """``PREFIX_NAME``; here, the variables are in upper case and none is empty."""
    layer: Layer = {}
    variables = {env_name(place, prefix) for place in places}
    for name, option in names.items():
        variable = env_name(name, prefix)
        variables.add(variable)
        if (text := env.get(variable)) is not None:
            shown = f"{variable}={masked(text, name, option)}"
            layer[name] = RawValue(text, name, variable, shown, unitless=True)
    for variable in env if prefix and findings.unknown != "ignore" else ():
        name = variable.removeprefix(prefix)
        if name != variable and variable not in variables and _SERVICE_LINK.search(name) is None:
            findings.report_unknown(variable, name.lower(), names, prefix)
    return layer


def code(settings: Mapping[str, object], names: Mapping[str, Option], findings: Findings) -> Layer:
    """Values given in code, by the names of options."""
    layer: Layer = {}
    for name, value in settings.items():
        if (option := names.get(name)) is None:
            findings.fault(unknown(name, name, names))
        else:
            shown = f"{name}={HIDDEN if hides(name, option) else repr(value)}"
            layer[name] = RawValue(value, name, "code", shown)
    return layer


def by_option(layer: Layer, options: Iterable[Option], findings: Findings) -> Layer:
    """Return the values of a source by option: an old name counts only if the new name is absent."""
    chosen: Layer = {}
    for option in options if layer else ():
        present = [layer[name] for name in option.names if name in layer]
        if len(present) > 1 and present[1].name == option.file_name:
            findings.fault(f"{present[0].shown} and {present[1].shown}: give one of them")
        if present:
            chosen[option.name] = present[0]
    return chosen


def _unexpected_word(word: str, names: Mapping[str, Option]) -> str:
    """Return a message without the value, which might be a secret."""
    shown = word.partition("=")[0] or word
    name = shown.lstrip("-").lower()
    hint = f"; did you mean --{name}?" if name in names else ""
    return f"{shown}: not expected here; settings are --name=value{hint}"
