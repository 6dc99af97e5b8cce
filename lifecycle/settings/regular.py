"""Reads small files that others may have put something else in place of."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

LARGEST: Final = 1 << 20
"""Bytes of a file that are read at most; a ConfigMap holds no more."""


def read_regular(path: Path | str, largest: int = LARGEST) -> bytes:
    """The contents of a file.

    Raises OSError also for what is not a file and for one that is too large, without waiting for anybody, as
    a pipe would have it, and without end, as a device would.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        contents = os.read(fd, largest + 1)  # of a file, all there is comes at once
    finally:
        os.close(fd)
    if len(contents) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest} bytes", str(path))
    return contents
