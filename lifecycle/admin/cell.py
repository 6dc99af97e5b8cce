"""The admin cell: a socket for access to a running hive."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lifecycle.admin.history import TableHistory
from lifecycle.admin.hive_commands import HiveCommands
from lifecycle.admin.script import Commands
from lifecycle.admin.server import AdminServer, AdminSocket
from lifecycle.admin.table_commands import TableCommands
from lifecycle.hints import Member
from lifecycle.hive.switch import Modules
from lifecycle.hive.view import HiveView
from lifecycle.hooks import Lifecycle
from lifecycle.injection import Cell, ModuleId, config, group, invoke, module, provide_private
from lifecycle.jobs import JobMetrics
from lifecycle.process.health import HealthTree
from lifecycle.settings import Settings
from lifecycle.tables import Tables

__all__ = ["AdminSettings", "admin", "commands_cell"]


class AdminSettings(Settings, frozen=True):
    """Settings of the admin socket."""

    admin_socket: Path | None = Path("admin.sock")
    """Unix socket to look into this process with the command shell; nothing for none."""

    admin_history: Annotated[int, Meta(ge=0)] = 0
    """Past moments of all tables that the shell can show; 0: none."""


def admin(socket: Callable[..., AdminSocket] | None = None) -> Cell:
    """Return the module ``admin``: commands over a unix socket, its own and those that cells contribute.

    The socket is that of AdminSettings, unless `socket`, a constructor with any dependencies, returns
    another.
    """
    place = (provide_private(socket),) if socket else (config(AdminSettings), provide_private(_own))
    return module(
        "admin",
        "A look into the running hive",
        *place,
        provide_private(table_history, table_commands, served_hive_commands, AdminServer),
        invoke(AdminServer),
    )


def _own(settings: AdminSettings) -> AdminSocket:
    return AdminSocket(settings.admin_socket, history=settings.admin_history)


def table_history(place: AdminSocket, tables: Tables, lifecycle: Lifecycle) -> TableHistory:
    """Past moments of tables for the shell."""
    return TableHistory(place.history, tables, lifecycle)


def table_commands(tables: Tables, history: TableHistory) -> Member[Commands]:
    """Commands for tables."""
    return TableCommands(tables, history)


def hive_commands(
    view: HiveView, health: HealthTree, jobs: JobMetrics, modules: Modules, tables: Tables
) -> Member[Commands]:
    """Commands for the hive."""
    return HiveCommands(view, health, jobs, modules, tables)


def served_hive_commands(
    view: HiveView,
    health: HealthTree,
    jobs: JobMetrics,
    modules: Modules,
    tables: Tables,
    own: ModuleId,
    place: AdminSocket,
) -> Member[Commands]:
    """As hive_commands(), but they do not disable the module that serves them or the modules that AdminSocket
    keeps.
    """
    return HiveCommands(view, health, jobs, modules, tables, served_by=own, keeps=place.keeps)


def no_history(tables: Tables, lifecycle: Lifecycle) -> TableHistory:
    """None: a script has just written what it reads."""
    return TableHistory(0, tables, lifecycle)


commands_cell = group(provide_private(no_history, table_commands, hive_commands))
"""The commands of every hive, for the module that contains this cell."""
