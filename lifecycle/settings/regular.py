"""Reads small regular files safely, whatever may have replaced them."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

LARGEST: Final = 1 << 20
"""Maximum size in bytes; a ConfigMap is not larger."""


def read_regular(path: Path | str, largest: int = LARGEST) -> bytes:
    """Return the contents of a file.

    Also raises OSError for a path that is not a regular file and for a file that is too large: it neither
    blocks, as a pipe would, nor reads without end, as from a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        contents = os.read(fd, largest + 1)  # one read returns the whole file
    finally:
        os.close(fd)
    if len(contents) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", str(path))
    return contents
