"""Settings as a hive reads them."""

from __future__ import annotations

from lifecycle import GraphError, Hive, Settings, config


def refused(struct: type[Settings], **values: object) -> str:
    """Why these values of fields are refused, a line for each; empty for those that are taken."""
    given = {name.replace("_", "-"): value for name, value in values.items()}
    try:
        Hive(config(struct), settings=given).check()
    except GraphError as error:
        return "\n".join(fault.text for fault in error.faults)
    return ""
