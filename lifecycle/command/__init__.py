"""A hive as a command: runs and checks it, shows its graph, completes its flags."""

from lifecycle.command.imported import hive_at
from lifecycle.command.main import main
from lifecycle.command.shell import shell

__all__ = ["hive_at", "main", "shell"]
