"""The stack of the datapath's programs stays within the strictest kernel's 512 bytes per call chain.

Kernels before 6.8 round each frame up to 32 bytes, later ones to 16 (check_max_stack_depth() of the
verifier), so this kernel may load what another rejects. Frames also differ by compiler: every installed one
is tested.
"""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cells.datapath.build import FLAGS, NEWEST, OLDEST, PROGRAMS, SOURCES, arch_headers, find_clang

MOST, ROUNDED = 512, 32
COMPILERS = sorted(
    {path for number in range(OLDEST, NEWEST + 1) if (path := shutil.which(f"clang-{number}"))}
    or {find_clang()}
)


def deepest(assembly: str, usage: str) -> tuple[int, list[str]]:
    """The bytes of the deepest chain of calls, and the functions that it is made of."""
    sizes = {name: int(size) for name, size in re.findall(r"^.*:(\w+)\t(\d+)\t\w+$", usage, re.MULTILINE)}
    calls: dict[str, set[str]] = {name: set() for name in sizes}
    inside = ""
    for line in assembly.splitlines():
        if found := re.match(r"(\w+):", line):
            inside = found[1] if found[1] in sizes else inside
        elif (found := re.match(r"\s+call (\w+)", line)) and found[1] in sizes:
            calls[inside].add(found[1])

    @functools.cache
    def depth(name: str) -> tuple[int, tuple[str, ...]]:
        below, chain = max(map(depth, calls[name]), default=(0, ()))
        return max(-(-sizes[name] // ROUNDED), 1) * ROUNDED + below, (f"{name} ({sizes[name]})", *chain)

    most, chain = max(map(depth, sizes))
    return most, list(chain)


@pytest.mark.parametrize("clang", COMPILERS)
def test_no_chain_of_calls_takes_more_stack_than_any_kernel_gives(clang: str, tmp_path: Path) -> None:
    for program in PROGRAMS:
        target = tmp_path / f"{program}.s"
        options = (*FLAGS, f"-I{arch_headers()}", f"-I{SOURCES}", "-fstack-usage", "-S")
        subprocess.run([clang, *options, str(SOURCES / f"{program}.c"), "-o", str(target)], check=True)
        most, chain = deepest(target.read_text(), target.with_suffix(".su").read_text())
        assert most <= MOST, f"{program}.c: {most} bytes: {' -> '.join(chain)}"
