"""``hive config set``: changes runtime options of the agent.

Source: cilium-dbg config OPTION=VALUE.
"""

from pathlib import Path

import click

from hive import completion
from hive.client import ask, patch, socket_option, timeout_option

ENFORCEMENT = {"policyenforcement", "policy-enforcement", "enable-policy"}


@click.command("set")
@click.argument(
    "options", nargs=-1, required=True, metavar="OPTION=VALUE...", shell_complete=completion.options
)
@socket_option
@timeout_option
def set_options(options: tuple[str, ...], agent_socket: Path, timeout: float) -> None:
    """Change runtime options of the agent until its next start: PolicyEnforcement=always, Debug=Enabled.

    Either all or none are changed. They apply from the next packet on.
    """
    spec = ask("/v1/config", agent_socket, timeout=timeout)["spec"]
    known = {name.lower(): name for name in spec.get("options") or {}}
    wanted = dict(spec.get("options") or {})
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{text}: expected OPTION=VALUE, such as PolicyEnforcement=always")
        if name.lower() in ENFORCEMENT:
            spec["policy-enforcement"] = value
        else:
            wanted[known.get(name.lower(), name)] = value
    patch("/v1/config", spec | {"options": wanted}, agent_socket, timeout)
