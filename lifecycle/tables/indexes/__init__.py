"""Indexes of tables: by equality, range, prefix and longest IP prefix."""

from lifecycle.tables.indexes.hashed import Index, Plan, RowSource, Values
from lifecycle.tables.indexes.kinds import LPM, IndexSpec, Sorted, index_of
from lifecycle.tables.indexes.lookup import Lookup

__all__ = ["LPM", "Index", "IndexSpec", "Lookup", "Plan", "RowSource", "Sorted", "Values", "index_of"]
