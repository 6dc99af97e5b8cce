"""``cilium-dbg config``: the agent's options.

Source: Cilium 1.17, cilium-dbg/cmd/config*.go, pkg/option.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click

from hive.dbg.go_text import json_text, model, output_option, printed
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail

OPTIONS: Final = {
    "ConntrackAccounting": "Enable per flow (conntrack) statistics",
    "ConntrackLocal": "Use endpoint dedicated tracking table instead of global one",
    "Debug": "Enable debugging trace statements",
    "DebugLB": "Enable debugging trace statements for load balancer",
    "DebugPolicy": "Enable debugging trace statements for policy enforcement",
    "DropNotification": "Enable drop notifications",
    "MonitorAggregationLevel": "Set the level of aggregation for monitor events in the datapath",
    "PolicyAccounting": "Enable policy accounting ",
    "PolicyAuditMode": "Enable audit mode for policies",
    "PolicyVerdictNotification": "Enable policy verdict notifications",
    "SourceIPVerification": "Enable the check of the source IP on pod egress",
    "TraceNotification": "Enable trace notifications",
}
"""Options of Cilium's client, and their descriptions."""
AGGREGATION: Final = "MonitorAggregationLevel"
_LEVELS: Final = {
    "": 0,
    "none": 0,
    "disabled": 0,
    "lowest": 1,
    "low": 2,
    "medium": 3,
    "max": 4,
    "maximum": 4,
    **{str(number): number for number in range(5)},
}
_WORDS: Final = {
    **dict.fromkeys(("enable", "enabled", "true", "1", "on"), True),
    **dict.fromkeys(("disable", "disabled", "false", "0", "off"), False),
}


class InvalidOptionError(ValueError):
    """Raised for an option that the client does not know, or a value of another kind."""


@click.command()
@click.argument("options", nargs=-1)
@click.option("-a", "--all", "show_all", is_flag=True, help="Print all configs (read-write and read-only)")
@click.option("-r", "--read-only", is_flag=True, help="Only print read-only configurations")
@click.option("--list-options", is_flag=True, help="List available options")
@click.option("-n", "--num-pages", type=int, default=0, help="Number of pages for perf ring buffer")
@output_option
def command(
    options: tuple[str, ...],
    show_all: bool,
    read_only: bool,
    list_options: bool,
    num_pages: int,
    output: str,
) -> None:
    """Cilium configuration options"""
    if list_options:
        click.echo(options_text(OPTIONS), nl=False)
    elif options[:1] == ("get",):
        _get(options[1:])
    elif options or num_pages:
        _change(options, num_pages)
    else:
        _show(_status(), show_all, read_only, output)


def _status() -> Any:
    status = ask_or_fail("Error while retrieving configuration", "GET /config").get("status")
    if not status:
        raise click.ClickException("Empty configuration status returned")
    return status


def _realized(status: Any) -> dict[str, Any]:
    """Options that can be changed, without pages and policy enforcement."""
    return (status.get("realized") or {}).get("options") or {}


def _show(status: Any, show_all: bool, read_only: bool, output: str) -> None:
    fixed = status.get("daemonConfigurationMap") or {}
    realized = status.get("realized") or {}
    if output:
        value: Any = model({"options": _realized(status)}).get("options", {})
        if read_only:
            value = dict(sorted(fixed.items()))
        elif show_all:
            value = dict(sorted({**fixed, **model(realized)}.items()))
        click.echo(printed(value, output))
        return
    text = ""
    if show_all or read_only:
        text += "#### Read-only configurations ####\n" + _read_only_lines(status)
    if not read_only:
        text += "##### Read-write configurations #####\n" + option_lines(_realized(status))
        if (pages := status.get("nodeMonitor")) is not None:
            text += _line("MonitorNumPages", str(pages.get("npages", 0)))
        text += _line("PolicyEnforcement", realized.get("policy-enforcement", ""))
    click.echo(text, nl=False)


def _get(names: Sequence[str]) -> None:
    """Print an option or a setting; their names may have hyphens, in any case."""
    if not names or not names[0]:
        raise click.ClickException("Missing config name argument\n")
    status = _status()
    realized = status.get("realized") or {}
    values = _by_lower_name(status.get("daemonConfigurationMap") or {})
    values |= _by_lower_name(realized.get("options") or {})
    values["policyenforcement"] = realized.get("policy-enforcement", "")
    name = re.sub(r"\W", "", names[0].lower(), flags=re.ASCII)
    if name not in values:
        raise click.ClickException("Configuration does not exist")
    click.echo(_go_value(values[name]))


def _by_lower_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names in lower case, and the members of those that are objects."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= {inner.lower(): one for inner, one in value.items()}
        found[name.lower()] = value
    return found


def _change(options: tuple[str, ...], num_pages: int) -> None:
    pages = (_status().get("nodeMonitor") or {}).get("npages")
    changed: dict[str, str] = {}
    enforcement = ""
    if num_pages and pages is not None and num_pages != pages:
        changed["MonitorNumPages"] = str(num_pages)
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.ClickException("Improper configuration format provided")
        if name == "PolicyEnforcement":
            enforcement = value
            continue
        try:
            proper, number = parse_option(text, OPTIONS)
        except InvalidOptionError as error:
            click.echo(str(error))
            raise click.exceptions.Exit(1) from error
        changed[proper] = value if proper == AGGREGATION else "Enabled" if number else "Disabled"
    try:
        spec = ask("GET /config").get("spec") or {}
        spec["options"] = {**(spec.get("options") or {}), **changed}
        ask("PATCH /config", body=spec | ({"policy-enforcement": enforcement} if enforcement else {}))
    except RequestFailedError as error:
        raise click.ClickException(f"Unable to change agent configuration: {error}\n") from error


def parse_option(text: str, known: Iterable[str]) -> tuple[str, int]:
    """Parse ``Name=enable``; return the option's proper name and number. Raises InvalidOptionError."""
    negated = text.startswith("!")
    name, equals, value = text.removeprefix("!").partition("=")
    if not equals or negated:
        raise InvalidOptionError(f"invalid {'boolean' if equals else 'option'} format")
    proper = next((one for one in known if one.lower() == name.lower()), None)
    if proper is None:
        raise InvalidOptionError(f'unknown option "{name}"')
    if proper != AGGREGATION:
        if (flag := _WORDS.get(value.lower())) is None:
            raise InvalidOptionError(f"invalid option value {value}")
        return proper, int(flag)
    if (level := _LEVELS.get(value.lower())) is None:
        raise InvalidOptionError(f'invalid monitor aggregation level "{value}"')
    return proper, level


def options_text(names: Iterable[str]) -> str:
    """The options, and what they do."""
    return "".join(f"{name:<24} {OPTIONS[name]}\n" for name in names)


def option_lines(values: Mapping[str, Any], *, indented: bool = False) -> str:
    """Return a line for each option, sorted; boolean values are Enabled or Disabled."""
    return "".join(_line(name, _switch(_go_value(values[name])), indented) for name in sorted(values))


def _switch(value: str) -> str:
    flag = _WORDS.get(value.lower())
    return value if flag is None else "Enabled" if flag else "Disabled"


def _line(name: str, value: str, indented: bool = False) -> str:
    return f"\t{name:<26}: {value}\n" if indented else f"{name:<34}: {value}\n"


def _read_only_lines(status: Any) -> str:
    text = ""
    for name, value in sorted((status.get("daemonConfigurationMap") or {}).items()):
        if isinstance(value, dict):
            text += f"{name}\n" + option_lines(value, indented=True)
        else:
            text += _line(name, _go_value(value))
    for name in ("k8s-configuration", "k8s-endpoint"):
        text += _line(name, status.get(name, ""))
    return text + option_lines(status.get("immutable") or {})


def _go_value(value: Any) -> str:
    """Format a value like Go."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{' '.join(map(_go_value, value))}]"
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{_go_value(value[key])}' for key in sorted(value))}]"
    return "<nil>" if value is None else str(value) if not isinstance(value, float) else json_text(value)
