"""Reads small regular files safely, whatever may have replaced them."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

LARGEST: Final = 1 << 20
"""Maximum size in bytes; a ConfigMap is not larger."""
_PAGE: Final = 4096


def read_regular(path: Path | str, largest: int = LARGEST) -> bytes:
    """Return the contents of a file.

    Also raises OSError for a path that is not a regular file and for a file that is too large: it neither
    blocks, as a pipe would, nor reads without end, as from a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        # of the file's size: mapping and unmapping a buffer of 64 MiB takes longer than the read
        contents = os.read(fd, min(max(status.st_size, _PAGE), largest) + 1)
        while status.st_size != len(contents) <= largest:  # it has grown, or is one of /proc, without a size
            more = os.read(fd, largest + 1 - len(contents))
            if not more:
                break
            contents += more
    finally:
        os.close(fd)
    if len(contents) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", str(path))
    return contents
