"""Parses settings as a hive does."""

from __future__ import annotations

from lifecycle import GraphError, Hive, Settings, config


def refused(struct: type[Settings], **values: object) -> str:
    """Return a line for each refused value of these fields; empty if all are valid."""
    given = {name.replace("_", "-"): value for name, value in values.items()}
    try:
        Hive(config(struct), settings=given).check()
    except GraphError as error:
        return "\n".join(fault.text for fault in error.faults)
    return ""
