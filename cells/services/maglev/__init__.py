"""Maglev consistent hashing: tables in C, compatible with Cilium's bit for bit.

Gives: MaglevTables, Seed, fill.
"""

from cells.services.maglev.table import Candidate, MaglevTables, fill
from cells.services.settings import Seed

__all__ = ["Candidate", "MaglevTables", "Seed", "fill"]
