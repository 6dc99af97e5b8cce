"""Compiles the eBPF objects (bpf/*.c into objects/), and the C libraries that cells load.

Used by make install, the image build and tests: ``python -P cells/datapath/build.py [libraries]``.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "bpf"
OBJECTS = Path(__file__).resolve().parent / "objects"
DIGEST = "sources.sha256"
"""The file beside the objects with the digest of their sources."""
PROGRAMS = ("dispatch", "datapath", "l3", "xdp", "gc", "sock")

NEWEST, OLDEST = 17, 14
"""Tested versions of clang. Code of clang 18 exceeds the kernel's stack limit."""

CONSTANTS, TAG = b".rodata.cfg", 32
"""The ELF section of the constants that the loader writes, and the size of its build tag in bytes."""

FLAGS = ("-target", "bpf", "-mcpu=v3", "-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


class ObjectBuildError(RuntimeError):
    """Raised when the objects cannot be compiled; names the missing tool or has the compiler's message."""


def compile_objects(out_dir: Path) -> list[Path]:
    """Compile all objects, such as ``datapath.o``, into ``out_dir`` and return their paths.

    Raises ObjectBuildError.
    """
    clang = find_clang()
    out_dir.mkdir(parents=True, exist_ok=True)
    digest = sources_digest()
    made = [compile_one(clang, SOURCES / f"{name}.c", out_dir / f"{name}.o") for name in PROGRAMS]
    (out_dir / DIGEST).write_text(digest, encoding="ascii")
    return made


def sources_digest() -> str:
    """Return the SHA-256 of all sources and of the compiler's flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.rglob("*.[ch]")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(SOURCES)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def are_current(out_dir: Path) -> bool:
    """Return whether the objects in a directory were compiled from the current sources."""
    try:
        return (out_dir / DIGEST).read_text(encoding="ascii") == sources_digest()
    except FileNotFoundError:
        return False


def tagged(source: Path, target: Path, tag: str) -> Path:
    """Write a copy of a compiled object with a build tag (at most 31 characters), to get another generation.

    The file's digest differs, and ``.rodata.cfg`` of the loaded programs shows the tag. It is the last field
    of that section (``struct config`` of ``bpf/lib/config.h``); sections are found as elf(5) describes.
    Raises ObjectBuildError.
    """
    if not re.fullmatch(rf"[\w.+-]{{0,{TAG - 1}}}", tag, re.ASCII):
        raise ObjectBuildError(
            f"build tag {tag!r}: expected at most {TAG - 1} of the characters A-Z a-z 0-9 _ . + -"
        )
    data = bytearray(source.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 40)  # e_shoff
    size, number, names = struct.unpack_from("<3H", data, 58)  # e_shentsize, e_shnum, e_shstrndx
    headers = [struct.unpack_from("<I20x2Q", data, table + size * each) for each in range(number)]
    for name, offset, length in headers:
        if data.startswith(CONSTANTS + b"\0", headers[names][1] + name):
            data[offset + length - TAG : offset + length] = tag.encode().ljust(TAG, b"\0")
            target.write_bytes(data)
            return target
    raise ObjectBuildError(f"{source}: expected an object with constants of the datapath, in .rodata.cfg")


def find_clang() -> str:
    """Return ``clang`` if its version is tested, else the newest tested ``clang-N``.

    Raises ObjectBuildError.
    """
    plain = shutil.which("clang")
    if plain is not None and OLDEST <= major_version(plain) <= NEWEST:
        return plain
    for version in range(NEWEST, OLDEST - 1, -1):
        if path := shutil.which(f"clang-{version}"):
            return path
    found = f"{plain} is clang {major_version(plain)}" if plain is not None else "no clang found"
    raise ObjectBuildError(
        f"{found}: to compile the eBPF programs, apt-get install one of clang-{OLDEST} to clang-{NEWEST}"
    )


def major_version(clang: str) -> int:
    """Return the major version of a compiler; 0 if it is unknown."""
    done = subprocess.run([clang, "-dumpversion"], capture_output=True, text=True, check=False)
    number = done.stdout.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def compile_one(clang: str, source: Path, target: Path, *headers: Path) -> Path:
    """Compile one file, with extra include directories, independently of the path of the sources.

    It is renamed into place, so concurrent builds are safe: a starting agent finds the old or the new file.
    """
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [
            *(clang, *FLAGS, f"-I{arch_headers()}", f"-I{source.parent}"),
            *(f"-I{folder}" for folder in headers),
            *("-fdebug-compilation-dir", ".", f"-ffile-prefix-map={source.parent}=."),
            *("-c", str(source), "-o", str(fresh)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ObjectBuildError(explain(done.stderr, source))
        return fresh.rename(target)


def arch_headers() -> Path:
    """Return the include directory with ``asm/types.h``, which clang does not search with -target bpf."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    directory = Path("/usr/include") / multiarch
    return directory if directory.is_dir() else Path("/usr/include")


def explain(errors: str, source: Path) -> str:
    """Return the compiler's message, or which package to install if a header is missing."""
    missing = re.search(r"'((?:bpf|linux|asm)/[\w/]+\.h)' file not found", errors)
    if missing:
        package = "libbpf-dev" if missing[1].startswith("bpf/") else "linux-libc-dev"
        return f"{source.name} needs <{missing[1]}>: apt-get install {package}"
    return f"{source.name} does not compile:\n{errors.strip()}"


# C libraries that cells load with ctypes.

CELLS = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "services/maglev/maglev.c": ("-nostdlib", "-ffreestanding"),
    "netlink/ahead/ahead.c": ("-pthread",),
}
"""Sources, with extra compiler flags."""
LIBRARY_FLAGS = (
    "-O2",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    f"-ffile-prefix-map={CELLS}=.",
)


class LibraryBuildError(RuntimeError):
    """Raised when a library cannot be compiled; names the missing tool or has the compiler's message."""


def compile_libraries() -> list[Path]:
    """Compile ``libNAME.so`` of each ``NAME.c`` and replace it atomically. Raises LibraryBuildError."""
    return [_compile_library(CELLS / source, flags) for source, flags in LIBRARIES.items()]


def _compile_library(source: Path, flags: tuple[str, ...]) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        raise LibraryBuildError(f"no gcc found to compile {source.name}: apt-get install gcc")
    out_dir = source.parent / "objects"
    out_dir.mkdir(exist_ok=True)
    target = out_dir / f"lib{source.stem}.so"
    with tempfile.TemporaryDirectory(prefix=".", dir=out_dir) as folder:
        fresh = Path(folder) / target.name
        command = [
            compiler,
            *LIBRARY_FLAGS,
            *flags,
            f"-ffile-prefix-map={CELLS}=.",
            str(source),
            "-o",
            str(fresh),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LibraryBuildError(f"{source.name} does not compile:\n{done.stderr.strip()}")
        return fresh.rename(target)


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["libraries"]:
            compile_libraries()
        else:
            compile_objects(OBJECTS)
    except (ObjectBuildError, LibraryBuildError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
