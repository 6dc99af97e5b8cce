"""The kernel's settings as files.

Needs: /proc/sys.   Gives: SysctlFiles.
"""

from pathlib import Path
from typing import Final

from lifecycle import HiveError

PROC: Final = Path("/proc/sys")
HOST_PROC: Final = Path("/host/proc/sys")
"""Where a container that is not privileged has the node's mounted: its own is read-only."""


class SysctlFiles:
    """Settings by their path below /proc/sys, such as ``net/ipv4/conf/all/rp_filter``."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or (HOST_PROC if HOST_PROC.is_dir() else PROC)

    def read(self, name: str) -> str | None:
        """The value, None if there is no such setting (of a device that is gone, say)."""
        try:
            return (self.root / name).read_text(encoding="ascii").strip()
        except OSError:
            return None

    def write(self, name: str, value: str) -> None:
        """Write it. Raises HiveError, one line that says what to do."""
        try:
            (self.root / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise HiveError(
                f"cannot set {name.replace('/', '.')}={value}: {error.strerror}; "
                f"make {self.root} writable for the agent, or set it on the node"
            ) from error


def sysctl_files() -> SysctlFiles:
    """The node's."""
    return SysctlFiles()
