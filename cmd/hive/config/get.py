"""``hive config get``: a setting, or a runtime option, of the running agent.

Source: cilium-dbg config get KEY.
"""

import difflib
from pathlib import Path

import click

from hive import completion
from hive.client import agent_options, ask
from hive.output import document


@click.command("get")
@click.argument("name", shell_complete=completion.settings)
@agent_options
def get_setting(name: str, agent_socket: Path, timeout: float, output: str) -> None:
    """Show the value of NAME in the running agent: a setting (mtu), or a runtime option (DropNotification).

    NAME is case-insensitive. For all settings: hive config list --live.
    """
    spec = ask("/v1/config", agent_socket, timeout=timeout)["spec"]
    found = {
        one["name"]: one["value"] for one in ask("/hive/config", agent_socket, timeout=timeout)["settings"]
    }
    found |= spec.get("options") or {}
    found["PolicyEnforcement"] = spec["policy-enforcement"]
    known = {each.lower(): each for each in found}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; did you mean {known[near[0]]}?" if near else "; hive config list --live names them"
        raise click.ClickException(f"the agent has no setting or option {name}{hint}")
    value = found[known[name.lower()]]
    text = document({"name": known[name.lower()], "value": value}, output)
    click.echo(value if text is None else text)
