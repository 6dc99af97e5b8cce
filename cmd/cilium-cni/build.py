"""Compiles the CNI plugin; runs in the build, so it needs the standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PLUGIN = SOURCES.parent / "hive" / "bin" / "cilium-cni"
FLAGS = ("-std=c11", "-static", "-Os", "-Wall", "-Wextra", "-Werror")
"""Static and musl: a process that starts in 0.05 ms, against 0.5 ms with glibc."""


def compile_plugin(output: Path = PLUGIN, *, options: Sequence[str] = ()) -> Path:
    """Compile the plugin to ``output`` unless it is newer than its sources; return its path.

    ``options`` are added to the command and always compile. Raises RuntimeError, which says what to
    install, when the compiler is missing, and with the compiler's words when it refuses the code.
    """
    inputs = sorted(SOURCES.glob("*.[ch]"))
    newest = max(path.stat().st_mtime for path in [*inputs, Path(__file__)])
    if not options and output.exists() and output.stat().st_mtime > newest:
        return output
    compiler = shutil.which("musl-gcc")
    if compiler is None:
        raise RuntimeError(
            "musl-gcc not found: the CNI plugin needs it; install it with: apt-get install musl-tools"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(path) for path in inputs if path.suffix == ".c"]
    with tempfile.TemporaryDirectory(prefix=".", dir=output.parent) as folder:  # others may compile, too
        fresh = Path(folder) / output.name
        done = subprocess.run(
            [compiler, *FLAGS, *options, "-s", "-o", str(fresh), *sources],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the CNI plugin does not compile:\n{done.stderr}")
        return fresh.replace(output)


if __name__ == "__main__":
    try:
        compile_plugin()
    except RuntimeError as error:
        sys.exit(str(error))
