"""``python -m hive``: the command without its console script."""

import sys

from hive.entry import main

if __name__ == "__main__":
    sys.exit(main())
