"""The entry point of ``hive``: ``hive agent`` starts without importing the modules of other commands."""

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; see hive.main for the exit codes."""
    first, *settings = sys.argv[1:] or [""]
    if first == "agent" and not {"--help", "-h", "--"} & set(settings):
        from hive.agent.process import run_agent

        try:
            sys.exit(run_agent(settings))
        except KeyboardInterrupt:
            print("hive: interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
    from hive.main import main as run_command

    run_command()
