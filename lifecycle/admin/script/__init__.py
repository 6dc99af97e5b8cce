"""Scripts: pages of text with commands, what they are expected to print, and the files they use.

Why:    a shell into a running hive and a test of a controller want the same words. The language is that of
        cilium/hive's script tests, so a page of theirs reads like one of ours.
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
