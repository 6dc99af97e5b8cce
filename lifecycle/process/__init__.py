"""The process of a hive: logs, health, metrics, event loop lag, sockets."""

from lifecycle.process.logs import (  # first: imports structlog without rich
    Logger,
    configure_logging,
    log_level,
    set_log_level,
    warning_counts,
)

# isort: split
from lifecycle.process.acceptor import Acceptor
from lifecycle.process.age import process_age
from lifecycle.process.health import Health, HealthStatus, HealthTree
from lifecycle.process.loop_lag import BOUNDS, LagHistogram, LoopLag, measured_loop
from lifecycle.process.metrics import (
    BUCKETS,
    CONTENT_TYPE,
    Collector,
    Family,
    Histogram,
    InconsistentError,
    Kind,
    Series,
    Value,
    counter,
    exposition,
    gauge,
    histogram,
    keyed,
)
from lifecycle.process.socket_path import clear_socket
from lifecycle.process.unix_socket import listen

__all__ = [
    "BOUNDS",
    "BUCKETS",
    "CONTENT_TYPE",
    "Acceptor",
    "Collector",
    "Family",
    "Health",
    "HealthStatus",
    "HealthTree",
    "Histogram",
    "InconsistentError",
    "Kind",
    "LagHistogram",
    "Logger",
    "LoopLag",
    "Series",
    "Value",
    "clear_socket",
    "configure_logging",
    "counter",
    "exposition",
    "gauge",
    "histogram",
    "keyed",
    "listen",
    "log_level",
    "measured_loop",
    "process_age",
    "set_log_level",
    "warning_counts",
]
