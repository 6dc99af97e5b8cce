"""The wire types of the API: one Struct for each object of its documents.

Needs:  msgspec.
Gives:  v1 and status and node (Cilium's document), hive (what is beside it).
"""
