"""The process: `python -m finder --help` tells what it can do."""

from finder import finder
from lifecycle import Hive, main

if __name__ == "__main__":
    main(Hive(finder, name="finder"), version="1.0")
