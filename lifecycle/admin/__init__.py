"""Access to a running hive: commands over a unix socket, and tables as plain data for other servers.

Neither source nor reconciler: a server. Add ``admin()`` to the cells of a hive. Cells contribute commands as
``Member[Commands]``; lifecycle.testing runs scripts of them.
"""

from lifecycle.admin.browse import Follower, TableChange, TableInfo, TableRow, changed, rows, tables_info
from lifecycle.admin.cell import admin
from lifecycle.admin.plain import plain
from lifecycle.admin.script import Arguments, Command, CommandError, Commands, Flag, State
from lifecycle.admin.server import AdminSocket

__all__ = [
    "AdminSocket",
    "Arguments",
    "Command",
    "CommandError",
    "Commands",
    "Flag",
    "Follower",
    "State",
    "TableChange",
    "TableInfo",
    "TableRow",
    "admin",
    "changed",
    "plain",
    "rows",
    "tables_info",
]
