"""Kafka rules: which requests there are. Source: the Kafka protocol's API keys."""

from __future__ import annotations

import re

from cells.policy.rules.errors import PolicyError
from cells.policy.rules.schema import KafkaRule

API_KEYS = frozenset(
    [
        "produce",
        "fetch",
        "offsets",
        "metadata",
        "leaderandisr",
        "stopreplica",
        "updatemetadata",
        "controlledshutdown",
        "offsetcommit",
        "offsetfetch",
        "findcoordinator",
        "joingroup",
        "heartbeat",
        "leavegroup",
        "syncgroup",
        "describegroups",
        "listgroups",
        "saslhandshake",
        "apiversions",
        "createtopics",
        "deletetopics",
        "deleterecords",
        "initproducerid",
        "offsetforleaderepoch",
        "addpartitionstotxn",
        "addoffsetstotxn",
        "endtxn",
        "writetxnmarkers",
        "txnoffsetcommit",
        "describeacls",
        "createacls",
        "deleteacls",
        "describeconfigs",
        "alterconfigs",
    ]
)
_TOPIC = re.compile(r"[a-zA-Z0-9._-]+")
_VERSION_RANGE = range(-(1 << 15), 1 << 15)


def check_kafka(rule: KafkaRule) -> None:
    """Refuse a request that does not exist. Raises PolicyError."""
    if rule.role is not None and rule.api_key:
        raise PolicyError(f'cannot set both Role "{rule.role}" and APIKey "{rule.api_key}" together')
    if rule.api_key and rule.api_key.lower() not in API_KEYS:
        raise PolicyError(f'invalid Kafka APIKey "{rule.api_key}"')
    if rule.api_version and not _is_version(rule.api_version):
        raise PolicyError(f'invalid Kafka APIVersion "{rule.api_version}"')
    if rule.topic and not _TOPIC.fullmatch(rule.topic):
        raise PolicyError(f'invalid Kafka Topic name "{rule.topic}"')


def _is_version(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", text) is not None and int(text) in _VERSION_RANGE
