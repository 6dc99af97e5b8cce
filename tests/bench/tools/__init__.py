"""The benchmark's own programs in C, compiled when needed."""

import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent


def tool(name: str, folder: Path) -> Path:
    """Compile ``name``.c into ``folder`` and return the program's path."""
    program = folder / name
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", program, SOURCES / f"{name}.c"], check=True, timeout=60)
    return program
