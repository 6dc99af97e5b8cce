"""Bindings of libbpf: open an object, set maps and constants, and load its programs.

Source: libbpf's header bpf/libbpf.h; its functions have a stable ABI within libbpf.so.1. ctypes: cffi takes
25 ms at the start to parse these dozen declarations, ctypes 0.3.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Final, Self

from lifecycle import HiveError

__all__ = ["LoadError", "LoadedObject"]


LIBRARY: Final = "libbpf.so.1"
LOG_DEBUG: Final = 2  # enum libbpf_print_level
LOG_LINE: Final = 1 << 20  # a verifier log is one message
LIBBPF_ERRNO_START: Final = 4000  # enum libbpf_errno: from here on strerror() has no text

_LOG_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_thread_log = threading.local()
"""``lines``: collects libbpf's messages of this thread."""
_capturing_threads: Final = [0]
"""Number of threads that capture messages; at 0, libbpf has no print function."""
_print_lock = threading.Lock()


class LoadError(HiveError):
    """Raised when the kernel or libbpf refuses an object; ``log`` has libbpf's and the verifier's log."""

    def __init__(self, what: str, code: int = 0, log: str = "") -> None:
        self.log = log
        parts = [what, os.strerror(code) if 0 < code < LIBBPF_ERRNO_START else "", refusal_reason(log)]
        super().__init__(": ".join(filter(None, parts)))


def refusal_reason(log: str) -> str:
    """Return the line with the reason: the verifier's last, else libbpf's first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for after, line in enumerate(lines):
        if line.startswith("processed ") and after:
            return lines[after - 1]
    return lines[0] if lines else ""


@cache
def library() -> ctypes.CDLL:
    """Load libbpf and declare its functions. Raises HiveError if it is not installed."""
    try:
        lib = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise HiveError(
            f"{LIBRARY} cannot be opened ({error}): install it, on Debian: apt-get install libbpf1"
        ) from error
    pointer, size, integer, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "libbpf_set_print": (pointer, [pointer]),
        "bpf_object__open_mem": (pointer, [pointer, size, pointer]),
        "bpf_object__load": (integer, [pointer]),
        "bpf_object__close": (None, [pointer]),
        "bpf_object__next_map": (pointer, [pointer, pointer]),
        "bpf_object__next_program": (pointer, [pointer, pointer]),
        "bpf_map__name": (text, [pointer]),
        "bpf_map__is_internal": (ctypes.c_bool, [pointer]),
        "bpf_map__reuse_fd": (integer, [pointer, integer]),
        "bpf_map__initial_value": (pointer, [pointer, ctypes.POINTER(size)]),
        "bpf_map__set_initial_value": (integer, [pointer, pointer, size]),
        "bpf_program__name": (text, [pointer]),
        "bpf_program__fd": (integer, [pointer]),
        "bpf_program__set_autoload": (integer, [pointer, ctypes.c_bool]),
        "bpf_program__autoload": (ctypes.c_bool, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.libbpf_set_print(None)
    return lib


class _OpenOptions(ctypes.Structure):
    """The first fields of struct bpf_object_open_opts; libbpf treats the others as zero."""

    _fields_ = (("size", ctypes.c_size_t), ("object_name", ctypes.c_char_p))


class LoadedObject:
    """An object file in libbpf: opened, given its maps and constants, then loaded.

    libbpf owns the descriptors of maps and programs; :meth:`close` closes them. Methods raise LoadError.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self._lib = library()
        self._object = self._opened(data)
        if not self._object:
            with captured_log() as log:  # once more for the messages: see load()
                self._opened(data)
                code = ctypes.get_errno()
            raise LoadError(f"{name} is not an eBPF object libbpf can read", code, "".join(log))
        self._data = data  # libbpf reads from it until the load
        self._steps: list[Callable[[LoadedObject], None]] = []
        self.maps: dict[str, int] = {
            self._lib.bpf_map__name(handle).decode(): handle for handle in self._each("bpf_object__next_map")
        }

    def _opened(self, data: bytes) -> Any:
        options = _OpenOptions(ctypes.sizeof(_OpenOptions), self.name.encode())
        return self._lib.bpf_object__open_mem(data, len(data), ctypes.byref(options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close libbpf's descriptors. Programs stay loaded if they are pinned, entered or attached."""
        if self._object:
            self._lib.bpf_object__close(self._object)
            self._object = None

    @property
    def tables(self) -> dict[str, int]:
        """Handles of the maps that the C source declares, by name, without those of its variables."""
        return {n: handle for n, handle in self.maps.items() if not self._lib.bpf_map__is_internal(handle)}

    def use_maps(self, descriptors: Mapping[str, int]) -> None:
        """Use these existing maps instead of the object's own maps of the same names."""
        self._steps.append(lambda retry: retry.use_maps(descriptors))
        for name, handle in self.tables.items():
            if name not in descriptors:
                raise LoadError(
                    f"{self.name} requires the map {name}, which the agent does not have", errno.ENOENT, ""
                )
            self._check(self._lib.bpf_map__reuse_fd(handle, descriptors[name]), f"cannot use map {name}")

    def constants(self, section: str) -> bytes:
        """Return the initial contents of a data section such as ``.rodata.cfg``."""
        size = ctypes.c_size_t()
        handle = self.maps.get(section)
        start = handle and self._lib.bpf_map__initial_value(handle, ctypes.byref(size))
        if not start:
            raise LoadError(f"{self.name} has no section {section}: it is not one of ours", errno.EINVAL)
        return ctypes.string_at(start, size.value)

    def set_constants(self, section: str, value: bytes) -> None:
        """Replace the contents of a data section, before the load."""
        self._steps.append(lambda retry: retry.set_constants(section, value))
        code = self._lib.bpf_map__set_initial_value(self.maps[section], value, len(value))
        self._check(code, f"cannot set {section}")

    def use_programs(self, names: Container[str]) -> None:
        """Load only these programs."""
        self._steps.append(lambda retry: retry.use_programs(names))
        for handle in self._each("bpf_object__next_program"):
            wanted = self._lib.bpf_program__name(handle).decode() in names
            self._check(self._lib.bpf_program__set_autoload(handle, wanted), "cannot choose programs")

    def load(self) -> None:
        """Load the programs. Raises LoadError with the verifier's log if the kernel refuses.

        Messages are off in the first attempt: there are thousands, and the thread would wait for the GIL for
        each. After a failure the object is loaded again, to capture them.
        """
        code = self.submit()
        if code < 0:
            self._check(code, "refused by the kernel", self._messages())

    def submit(self) -> int:
        """Load the programs; return a negative errno on failure."""
        return int(self._lib.bpf_object__load(self._object))

    def _messages(self) -> str:
        """Load this object once more and return libbpf's messages."""
        with captured_log() as log, LoadedObject(self._data, self.name) as retry:
            for step in self._steps:
                step(retry)
            retry.submit()
        return "".join(log)

    def programs(self) -> dict[str, int]:
        """Return the descriptors of the loaded programs, by their names in the source."""
        lib = self._lib
        handles = filter(lib.bpf_program__autoload, self._each("bpf_object__next_program"))
        return {lib.bpf_program__name(handle).decode(): lib.bpf_program__fd(handle) for handle in handles}

    def expect(self, names: Iterable[str]) -> None:
        """Raise LoadError if a program is missing."""
        if missing := set(names) - self.programs().keys():
            raise LoadError(f"{self.name} has no program {', '.join(sorted(missing))}")

    def _each(self, function: str) -> Iterator[int]:
        step = getattr(self._lib, function)
        handle = step(self._object, None)
        while handle:
            yield handle
            handle = step(self._object, handle)

    def _check(self, code: int, what: str, log: str = "") -> None:
        if code < 0:
            raise LoadError(f"{self.name}: {what}", -code, log)


def _append_message(level: int, template: int, arguments: int) -> int:
    """libbpf's print function: append the message to the log of the loading thread."""
    lines: list[str] | None = getattr(_thread_log, "lines", None)
    if lines is not None and level < LOG_DEBUG:
        text = ctypes.create_string_buffer(LOG_LINE)
        _format_text()(text, LOG_LINE, template, arguments)
        lines.append(text.value.decode(errors="replace"))
    return 0


_print_callback = _LOG_FUNCTION(_append_message)


@cache
def _format_text() -> Any:
    function = ctypes.CDLL(None).vsnprintf
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    return function


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Capture libbpf's messages of this thread, except debug messages, in a list."""
    lines: list[str] = []
    _thread_log.lines = lines
    _count_capturing(1)
    try:
        yield lines
    finally:
        _count_capturing(-1)
        _thread_log.lines = None


def _count_capturing(threads: int) -> None:
    with _print_lock:
        _capturing_threads[0] += threads
        library().libbpf_set_print(
            ctypes.cast(_print_callback, ctypes.c_void_p) if _capturing_threads[0] else None
        )
