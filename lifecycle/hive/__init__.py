"""The hive: checks, builds, starts and stops cells; alone, inside another hive, or as a process."""

from lifecycle.hive.hive import Hive
from lifecycle.hive.nested import InnerHive, nest
from lifecycle.hive.switch import Modules
from lifecycle.hive.view import HiveView

__all__ = ["Hive", "HiveView", "InnerHive", "Modules", "nest"]
