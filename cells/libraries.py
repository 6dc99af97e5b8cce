"""Compiles the cells' C into shared libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = {
    "services/maglev/maglev.c": ("-nostdlib", "-ffreestanding"),
    "netlink/ahead/ahead.c": ("-pthread",),
}
"""With the flags each needs besides."""
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    f"-ffile-prefix-map={HERE}=.",
)


class BuildError(RuntimeError):
    """A library cannot be compiled; the text has what is missing, or the compiler's message."""


def compile_libraries() -> list[Path]:
    """Compile ``libNAME.so`` of each ``NAME.c``; it takes its place at once. Raises BuildError."""
    return [_compile(HERE / source, flags) for source, flags in SOURCES.items()]


def _compile(source: Path, flags: tuple[str, ...]) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        raise BuildError(f"no gcc found to compile {source.name}: apt-get install gcc")
    out_dir = source.parent / "objects"
    out_dir.mkdir(exist_ok=True)
    target = out_dir / f"lib{source.stem}.so"
    with tempfile.TemporaryDirectory(prefix=".", dir=out_dir) as folder:
        fresh = Path(folder) / target.name
        command = [compiler, *FLAGS, *flags, f"-ffile-prefix-map={HERE}=.", str(source), "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{source.name} does not compile:\n{done.stderr.strip()}")
        return fresh.rename(target)


if __name__ == "__main__":
    try:
        compile_libraries()
    except BuildError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
