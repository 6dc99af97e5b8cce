"""Tables with one writer and many watchers, derived tables, and reconcilers."""

from lifecycle.tables.changes import Change, Changes
from lifecycle.tables.derived.inputs import Input, Plan
from lifecycle.tables.indexes import LPM, Index, Lookup, Sorted
from lifecycle.tables.rate_limit import RateLimit
from lifecycle.tables.read_table import Derived, Incremental, ReadTable
from lifecycle.tables.reconciler import Reconciler
from lifecycle.tables.registry import Tables
from lifecycle.tables.snapshot import Snapshot
from lifecycle.tables.snapshots import Snapshots, snapshot
from lifecycle.tables.table import Initializer, Table, Transaction, Transactions, transaction
from lifecycle.tables.target import (
    BatchError,
    BatchFailures,
    ObjectStatus,
    PatchTarget,
    ReconcileError,
    Statistics,
    Target,
    WriteThrough,
)

__all__ = [
    "LPM",
    "BatchError",
    "BatchFailures",
    "Change",
    "Changes",
    "Derived",
    "Incremental",
    "Index",
    "Initializer",
    "Input",
    "Lookup",
    "ObjectStatus",
    "PatchTarget",
    "Plan",
    "RateLimit",
    "ReadTable",
    "ReconcileError",
    "Reconciler",
    "Snapshot",
    "Snapshots",
    "Sorted",
    "Statistics",
    "Table",
    "Tables",
    "Target",
    "Transaction",
    "Transactions",
    "WriteThrough",
    "snapshot",
    "transaction",
]
