"""Settings: typed structs, the types of values, and the sources of values."""

from lifecycle.settings.durations import Duration, milliseconds, minutes, seconds
from lifecycle.settings.macs import MAC
from lifecycle.settings.options import Option, RenamedFrom, Settings, refuse
from lifecycle.settings.quantities import Quantity
from lifecycle.settings.regular import read_regular
from lifecycle.settings.secrets import Secret
from lifecycle.settings.sources import Loaded, Setting, Sources, load

__all__ = [
    "MAC",
    "Duration",
    "Loaded",
    "Option",
    "Quantity",
    "RenamedFrom",
    "Secret",
    "Setting",
    "Settings",
    "Sources",
    "load",
    "milliseconds",
    "minutes",
    "read_regular",
    "refuse",
    "seconds",
]
