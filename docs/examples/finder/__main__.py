"""The process: settings from flags and the environment, then run until a signal; --graph only shows it."""

import os
import sys

import anyio

from finder import finder
from lifecycle import Hive, Sources, configure_logging


def main(argv: list[str]) -> int:
    """Run the daemon, or with --graph print what it is made of; the exit code."""
    configure_logging()
    show = "--graph" in argv
    hive = Hive(
        finder,
        settings=Sources([word for word in argv if word != "--graph"], os.environ, prefix="FINDER_"),
        name="finder",
    )
    if show:
        sys.stdout.write(hive.graph().tree())
        return 0
    return anyio.run(hive.run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
