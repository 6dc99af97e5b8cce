"""``python -m lifecycle``: checks, shows, compares and talks to any hive."""

import os
import sys

from lifecycle.command.any_hive import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], os.environ))
