"""A hive as a command of its own: runs it, checks it, shows what it is made of, completes its flags.

Needs:  a hive.
Gives:  main(); shell(), which talks to one that runs.
"""

from lifecycle.command.main import main
from lifecycle.command.shell import shell

__all__ = ["main", "shell"]
