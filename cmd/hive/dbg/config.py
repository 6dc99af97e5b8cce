"""``cilium-dbg config``: the agent's options.

Source: Cilium 1.17, cilium-dbg/cmd/config*.go, pkg/option.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import click

from hive.dbg.go_text import json_text, model, output_option, printed
from hive.dbg.requests import ask_or_fail

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
"""Options that the client knows, and what they do."""
_WORDS: Final = {
    **dict.fromkeys(("enable", "enabled", "true", "1", "on"), True),
    **dict.fromkeys(("disable", "disabled", "false", "0", "off"), False),
}


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
        _get(options[1:], output)
    elif options or num_pages:
        _change(options, num_pages)
    else:
        _show(_status(), show_all, read_only, output)


def _config() -> Any:
    return ask_or_fail("Error while retrieving configuration", "GET /config")


def _status() -> Any:
    status = _config().get("status")
    if not status:
        raise click.ClickException("Empty configuration status returned")
    return status


def _realized(status: Any) -> dict[str, Any]:
    """Options that can be changed, without pages and policy enforcement."""
    return (status.get("realized") or {}).get("options") or {}


def _read_only(status: Any) -> dict[str, Any]:
    """Settings that cannot be changed, as they are printed one after another."""
    values: dict[str, Any] = dict(sorted((status.get("daemonConfigurationMap") or {}).items()))
    for name in ("k8s-configuration", "k8s-endpoint"):
        values[name] = status.get(name, "")
    return values | dict(sorted((status.get("immutable") or {}).items()))


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
        text += "#### Read-only configurations ####\n" + option_lines(_read_only(status))
        text += "\n" if show_all else ""
    if not read_only:
        text += "##### Read-write configurations #####\n" + option_lines(
            dict(sorted(_realized(status).items()))
        )
        pages = (status.get("nodeMonitor") or {}).get("npages", 0)
        changeable = {"MonitorNumPages": pages, "PolicyEnforcement": realized.get("policy-enforcement", "")}
        text += option_lines(changeable)
    click.echo(text, nl=False)


def _get(names: tuple[str, ...], output: str) -> None:
    if len(names) != 1:
        raise click.ClickException("Please specify one configuration to get")
    status = _status()
    values = {name.lower(): value for name, value in _realized(status).items()}
    for name, value in _read_only(status).items():
        values.setdefault(name.lower(), value)
    if (found := values.get(names[0].lower())) is None:
        raise click.ClickException("Configuration does not exist")
    click.echo(printed(found, output) if output else _go_value(found))


def _change(options: tuple[str, ...], num_pages: int) -> None:
    _status()
    spec = _config().get("spec") or {}
    known = {name.lower(): name for name in (*OPTIONS, *(spec.get("options") or {}))}
    enforcement = None
    others = []
    for text in options:
        name, _, value = text.partition("=")
        if name.lower() == "policyenforcement":
            enforcement = value
        else:
            others.append(text)
    changed = changed_options(others, known, {True: "Enabled", False: "Disabled"})
    if num_pages:
        changed["MonitorNumPages"] = str(num_pages)
    spec["options"] = {**(spec.get("options") or {}), **changed}
    if enforcement is not None:
        spec["policy-enforcement"] = enforcement
    ask_or_fail("Unable to change agent configuration", "PATCH /config", body=spec)


def changed_options(
    texts: Iterable[str], known: Mapping[str, str], words: Mapping[bool, str]
) -> dict[str, str]:
    """Options as ``Name=value`` names them, under their proper names. Raises click.ClickException."""
    changed = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if (proper := known.get(name.lower())) is None:
            raise click.ClickException(f'Cannot parse option {text}: unknown option "{name}"')
        if not equals:
            raise click.ClickException(f"Cannot parse option {text}: expected {proper}=enable|disable")
        flag = _WORDS.get(value.lower())
        if flag is None and proper != "MonitorAggregationLevel":
            raise click.ClickException(f'Cannot parse option {text}: invalid option value "{value}"')
        changed[proper] = value if flag is None else words[flag]
    return changed


def options_text(names: Iterable[str]) -> str:
    """The options, and what they do."""
    return "".join(f"{name:<24} {OPTIONS[name]}\n" for name in names)


def option_lines(values: Mapping[str, Any]) -> str:
    """A line for each value; what has parts has a line for each of them."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines.append(name)
            lines += [f"\t{key:<26}: {_go_value(value[key])}" for key in sorted(value)]
        else:
            lines.append(f"{name:<34}: {_go_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def _go_value(value: Any) -> str:
    """A value as Go prints it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{' '.join(map(_go_value, value))}]"
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{_go_value(value[key])}' for key in sorted(value))}]"
    return "<nil>" if value is None else str(value) if not isinstance(value, float) else json_text(value)
