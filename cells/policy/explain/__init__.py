"""Seeing why: which rule of which file decides on a connection, and what is wrong in a folder of policies.

Pure values; no cell.
Gives: read_folder, Cluster, decide, check, and what they return.
"""

from cells.policy.explain.check import Finding, check
from cells.policy.explain.cluster import Cluster, KnownPod, PodName
from cells.policy.explain.files import BadFile, Located, read_folder
from cells.policy.explain.reasons import Near, Reason, decide

__all__ = [
    "BadFile",
    "Cluster",
    "Finding",
    "KnownPod",
    "Located",
    "Near",
    "PodName",
    "Reason",
    "check",
    "decide",
    "read_folder",
]
