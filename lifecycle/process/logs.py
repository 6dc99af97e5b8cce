"""Structured logs, one event a line."""

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Literal, TextIO, cast

from lifecycle.hints.keys import set_alias
from lifecycle.process.blocked_imports import imports_blocked
from lifecycle.process.logfmt import render_logfmt

with imports_blocked("rich", "colorama", "better_exceptions"):
    import structlog

__all__ = [
    "Format",
    "Logger",
    "configure_logging",
    "log_level",
    "logger_for",
    "set_log_level",
    "warning_counts",
]

Logger = structlog.typing.FilteringBoundLogger
set_alias(Logger, "Logger")
Format = Literal["auto", "text", "logfmt", "json"]

_warnings: Counter[tuple[str, str]] = Counter()

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "critical": 50}


class _LevelLogger(structlog.BoundLoggerBase):
    """The class of every logger. Methods below the log level are no-ops."""

    level = "debug"


def set_log_level(level: str) -> None:
    """Log from `level` up from now on, with all loggers. Raises ValueError for an unknown level."""
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r}: expected one of {', '.join(_LEVELS)}")
    for name, method in vars(structlog.make_filtering_bound_logger(_LEVELS[level])).items():
        if not name.startswith("__"):
            setattr(_LevelLogger, name, method)
    _LevelLogger.level = level


def log_level() -> str:
    """Return the lowest level that is logged; debug if none was set."""
    return _LevelLogger.level


def logger_for(module: str, base: Logger | None = None) -> Logger:
    """Return the logger of a module.

    Without a base, it is configured by configure_logging() or has defaults.
    """
    if base is not None:
        return base.bind(module=module)
    if not structlog.is_configured():
        configure_logging()
    logger: Logger = structlog.get_logger(module=module)
    return logger


def configure_logging(
    level: str = "info",
    format: Format = "auto",  # noqa: A002  # reads as it is meant: format="json"
    stream: TextIO | None = None,
) -> None:
    """Set up logging of the process to `stream`, by default standard error.

    auto is text on a terminal, otherwise logfmt. Logs of libraries through the standard library's logging
    have the same form, from warnings up. Raises ValueError for an unknown level or format.
    """
    set_log_level(level)
    stream = cast("TextIO", _StandardError()) if stream is None else stream
    if format == "auto":
        format = "text" if stream.isatty() else "logfmt"  # noqa: A001
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _count_warning,
            *_renderers(format, stream),
        ],
        wrapper_class=_LevelLogger,
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())


def warning_counts() -> Mapping[tuple[str, str], int]:
    """Number of lines at level warning and above, by level and module.

    Only from loggers that configure_logging() set up. The module is that of the line or, for a library, its
    logger.
    """
    return _warnings


def _count_warning(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if (level := event["level"]) in {"warning", "error", "critical"}:
        _warnings[level, event.get("module", "")] += 1
    return event


def _renderers(format: Format, stream: TextIO) -> list[structlog.typing.Processor]:  # noqa: A002
    if format == "text":
        return [
            structlog.processors.TimeStamper("%H:%M:%S.%f", utc=False),
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0),
        ]
    shared: list[structlog.typing.Processor] = [
        structlog.processors.TimeStamper("iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("msg"),
    ]
    if format == "json":
        return [*shared, structlog.processors.JSONRenderer(sort_keys=False)]
    if format == "logfmt":
        return [render_logfmt]
    raise ValueError(f"log format {format!r}: expected one of auto, text, logfmt, json")


class _StandardError:
    """Standard error at the time of the write, as it may be replaced, for example in tests.

    A line that cannot be written (a full disk, a closed pipe) is lost, and the caller continues.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


class _ToStructlog(logging.Handler):
    """Passes records of the standard library's loggers to structlog."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger(module=record.name)
        logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info or None)
