"""Compiles the CNI plugin, for the wheel's build and for ``make``.

Needs: musl-gcc (Debian: musl-tools), the standard library.   Gives: ``compile_plugin``.
Why musl: the plugin is started for every pod, and a static musl program starts in 0.05 ms, a static
glibc one in 0.5 ms.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
DESTINATION = SOURCES.parent / "hive" / "bin" / "cilium-cni"
FLAGS = ("-std=c11", "-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE")


def compile_plugin(destination: Path = DESTINATION) -> Path:
    """Compile ``cilium-cni`` to ``destination`` and return it; the old file is replaced atomically.

    Raises RuntimeError, with one line that says what to install or what the compiler said.
    """
    compiler = shutil.which("musl-gcc")
    if compiler is None:
        raise RuntimeError("musl-gcc not found: install it (Debian: apt-get install musl-tools)")
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = destination.with_name(f".{destination.name}.new")
    command = [compiler, *FLAGS, "-o", str(fresh), *map(str, sorted(SOURCES.glob("*.c")))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"musl-gcc failed on the CNI plugin:\n{result.stderr}")
    fresh.replace(destination)
    return destination


if __name__ == "__main__":
    try:
        print(compile_plugin())
    except RuntimeError as error:
        sys.exit(str(error))
