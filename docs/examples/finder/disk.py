"""The files of the notes, as far as this daemon touches them.

Edge: the disk.
"""

from pathlib import Path
from typing import Protocol

from lifecycle import HiveError, Settings, config, module, provide


class DiskSettings(Settings, frozen=True):
    """Settings of the disk cell."""

    folder: Path = Path("notes")
    """Folder with the notes: files that end in .txt."""


class Files(Protocol):
    """Where notes come from."""

    def read(self) -> dict[str, str]:
        """Every note's text by its name, blocking; raises OSError or HiveError."""
        ...


class Disk:
    """Files of the folder of the settings."""

    def __init__(self, settings: DiskSettings) -> None:
        self._folder = settings.folder

    def read(self) -> dict[str, str]:
        """As Files says."""
        if not self._folder.is_dir():
            raise HiveError(f"folder {self._folder} is not a directory: make it, or name one with --folder")
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.txt"))}


def files(disk: Disk) -> Files:
    """The disk, as others see it."""
    return disk


cell = module("disk", "Files on disk", config(DiskSettings), provide(Disk, files))
