"""The shell socket: commands to the running agent, for ``hive shell`` and an unmodified ``cilium-dbg shell``.

Edge:   answers lines with text; its own commands look at tables, health, graph, start, jobs and logs.
Source: Cilium 1.17, pkg/shell: the socket and its setting. Only root may connect: commands can stop modules.

Settings: shell-sock-path, shell-history.
"""

from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from cells.config import AgentConfig
from lifecycle import Settings, config, module
from lifecycle.admin import AdminSocket, admin

__all__ = ["ShellSettings", "cell"]


class ShellSettings(Settings, frozen=True):
    """Settings of the shell."""

    shell_sock_path: Path | None = Path("shell.sock")
    """Unix socket of the command shell, in the state-dir unless absolute; nothing for none."""

    shell_history: Annotated[int, Meta(ge=0)] = 0
    """Past moments of all tables that the shell can show (db/moments), at most one a second; 0: none."""


_NOT_STOPPED: Final = {
    "agent.endpoint-restore": ("running pods would not be restored unchanged: restart the agent instead"),
    "agent.router": "routes of running pods would change: restart the agent instead",
}
"""Modules that are not brought back as they were while pods run."""


def shell_socket(agent: AgentConfig, settings: ShellSettings) -> AdminSocket:
    """Where the shell is; made once the agent has claimed its node."""
    path = settings.shell_sock_path
    return AdminSocket(
        None if path is None else agent.state_dir / path, keeps=_NOT_STOPPED, history=settings.shell_history
    )


cell = module("shell", "Command shell on shell.sock", config(ShellSettings), admin(shell_socket))
