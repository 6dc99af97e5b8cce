"""The hive: cells, checked, built, started, stopped; alone, inside another, and as a process."""

from lifecycle.hive.hive import Hive
from lifecycle.hive.nested import InnerHive, nest
from lifecycle.hive.switch import Modules
from lifecycle.hive.view import HiveView

__all__ = ["Hive", "HiveView", "InnerHive", "Modules", "nest"]
