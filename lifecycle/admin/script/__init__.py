"""Scripts: pages of text with commands, their expected output, and files.

Why:    a shell into a running hive and tests of controllers use the same commands. The language is that of
        cilium/hive's script tests, so their pages look like ours.
"""

from lifecycle.admin.script.archive import Archive, parse
from lifecycle.admin.script.builtin import builtin, help_command
from lifecycle.admin.script.command import (
    Arguments,
    Command,
    CommandError,
    Commands,
    ConfirmationNeededError,
    Flag,
    State,
    StopScript,
)
from lifecycle.admin.script.engine import Engine, ScriptError

__all__ = [
    "Archive",
    "Arguments",
    "Command",
    "CommandError",
    "Commands",
    "ConfirmationNeededError",
    "Engine",
    "Flag",
    "ScriptError",
    "State",
    "StopScript",
    "builtin",
    "help_command",
    "parse",
]
