"""A hive as a command of its own: runs it, checks it, shows what it is made of, completes its flags."""

from lifecycle.command.imported import hive_at
from lifecycle.command.main import main
from lifecycle.command.shell import shell

__all__ = ["hive_at", "main", "shell"]
