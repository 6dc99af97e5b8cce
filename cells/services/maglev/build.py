"""Compiles the Maglev table's C into a shared library.

For:    the package build, ``make`` and tests.
Needs:  gcc; of Python only the standard library, for this runs before the package exists.
Gives:  compile_library(); run as a program it compiles into ``objects`` beside this file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OBJECTS = HERE / "objects"
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-nostdlib",
    "-ffreestanding",
)


class BuildError(RuntimeError):
    """The library cannot be compiled; the text says what is missing, or what the compiler said."""


def compile_library(out_dir: Path = OBJECTS) -> Path:
    """Compile ``libmaglev.so`` into ``out_dir``; it takes its place at once. Raises BuildError."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise BuildError("no gcc found to compile the Maglev table: apt-get install gcc")
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / "libmaglev.so"
    with tempfile.TemporaryDirectory(prefix=".", dir=out_dir) as folder:
        fresh = Path(folder) / target.name
        command = [compiler, *FLAGS, f"-ffile-prefix-map={HERE}=.", str(HERE / "maglev.c"), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"maglev.c does not compile:\n{done.stderr.strip()}")
        return fresh.rename(target)


if __name__ == "__main__":
    try:
        compile_library()
    except BuildError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
