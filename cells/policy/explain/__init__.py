"""Seeing why: which rule of which file decides on a connection, and what is wrong in a folder of policies.

Pure values; no cell.
Gives: read_folder, Cluster, check; explained() and Directory, by which connections are explained.
"""

from cells.policy.explain.check import Finding, check
from cells.policy.explain.cluster import Cluster, KnownPod, PodName
from cells.policy.explain.connection import (
    End,
    Explained,
    ExplainedDirection,
    NearRule,
    Target,
    UnanswerableError,
    Way,
    explained,
)
from cells.policy.explain.directory import (
    Asked,
    Directory,
    Frontend,
    IPAddress,
    Served,
    headless,
    parse_asked,
    parse_destination,
    refusal,
    source_of,
    targets_of,
)
from cells.policy.explain.files import BadFile, Located, read_folder
from cells.policy.explain.reasons import Near, Reason, decide

__all__ = [
    "Asked",
    "BadFile",
    "Cluster",
    "Directory",
    "End",
    "Explained",
    "ExplainedDirection",
    "Finding",
    "Frontend",
    "IPAddress",
    "KnownPod",
    "Located",
    "Near",
    "NearRule",
    "PodName",
    "Reason",
    "Served",
    "Target",
    "UnanswerableError",
    "Way",
    "check",
    "decide",
    "explained",
    "headless",
    "parse_asked",
    "parse_destination",
    "read_folder",
    "refusal",
    "source_of",
    "targets_of",
]
