"""Lists intended differences of our plugin from the recorded one, and recordings that do not apply.

``correction`` is the number of the note that describes a leak, crash or missing feature of Cilium's plugin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tests.support.recordings import INDEX

NO_HTTP: Final = "our plugin and agent do not talk HTTP; the recorded HTTP answer is malformed"
CLOUD: Final = "the agent refuses IPAM modes of clouds at start"

EXCLUDED: Final = {
    "add_agent_503": NO_HTTP,
    "add_eni_ipam": CLOUD,
    "add_eni_ipam_missing_master_mac": CLOUD,
    "add_netkit": "the agent refuses datapath-mode=netkit at start",
    "fail_config_status_null": NO_HTTP,
    "fail_config_without_addressing": NO_HTTP,
    "fail_config_without_datapathmode_client1.17": NO_HTTP,
    "fail_config_without_datapathmode_client1.19": NO_HTTP,
    "fail_ipam_403_500": NO_HTTP,
    "fail_ipam_incomplete": NO_HTTP,
    "fail_put_timeout": "waits 90 s for an answer; test_plugin_del covers a shorter time-out",
}
"""Recordings of cni/ that are not replayed against our plugin, and the reasons."""


def _names() -> tuple[str, ...]:
    index = json.loads(INDEX.read_text())
    return tuple(row["file"].removeprefix("cni/").removesuffix(".json") for row in index["cni"])


ALL: Final = _names()
REPLAYED: Final = tuple(name for name in ALL if name not in EXCLUDED)


@dataclass(frozen=True)
class Difference:
    """The behaviour of our plugin in place of the recorded one."""

    reason: str
    correction: int | None = None
    """None for our own decisions, which ``reason`` explains."""
    exit_code: int | None = None
    stdout: Any = None
    """Keys of the printed object that differ, or the whole text; None: as recorded."""
    clean: bool = False
    """Our plugin leaves nothing; the recorded one leaves its link."""
    earlier: bool = False
    """Our plugin refuses before it requests an endpoint."""


VERSIONS: Final = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
_LEAK: Final = Difference("a failed ADD deletes its link", 7, clean=True)
_WORDS: Final = Difference(
    "the message is the agent's, not that of a Go HTTP client", stdout={"details": ...}
)
_GO: Final = Difference("the recorded message is that of Go's JSON parser", stdout={"msg": ...})
_SERVED: Final = Difference("STATUS is implemented and reports the agent's state", 15, 0, "")
_NO_RESULT: Final = Difference(
    "CHECK without a prevResult is refused, where Cilium's crashes",
    11,
    1,
    {
        "code": 7,
        "msg": "InvalidNetworkConfig",
        "details": "CHECK without a prevResult: the runtime has to pass the result of the ADD",
    },
)

DIFFERENT: Final[dict[tuple[str, int], Difference]] = {
    ("add_mac_override_invalid", 0): Difference(
        "refused before a link is created; the message names the annotation",
        7,
        stdout={"details": ...},
        clean=True,
        earlier=True,
    ),
    ("check_failures", 1): _WORDS,
    ("check_failures", 2): _WORDS,
    ("check_failures", 3): _WORDS,
    ("del_netns_missing_client1.17", 0): Difference("DEL of a vanished namespace succeeds", 14, 0, ""),
    ("del_netns_missing_client1.17", 1): Difference("DEL without a namespace succeeds", 14, 0, ""),
    ("fail_put_4xx", 0): _LEAK,
    ("fail_put_4xx", 1): _LEAK,
    ("fail_put_4xx", 2): Difference(
        "a failed ADD deletes its link; the message is the agent's",
        7,
        stdout={"msg": "unable to create endpoint: Rate limiter: exceeded"},
        clean=True,
    ),
    ("fail_put_500_client1.17", 0): _LEAK,
    ("fail_put_500_client1.19", 0): Difference(
        "the agent's message, without the quotes that client 1.19 adds",
        13,
        stdout={"msg": "unable to create endpoint: unable to create endpoint: build failed"},
    ),
    ("gc_client1.17", 0): Difference("GC is implemented", 16, 0, ""),
    ("misc_invocation_client1.17", 4): Difference(
        "CNI version 1.1.0 is supported", 15, stdout={"details": ...}
    ),
    ("misc_invocation_client1.17", 10): _NO_RESULT,
    ("misc_invocation_client1.17", 11): _GO,
    ("misc_invocation_client1.19", 10): _NO_RESULT,
    ("misc_invocation_client1.19", 11): _GO,
    ("status_client1.17", 0): _SERVED,
    ("status_client1.17", 1): _SERVED,
    ("status_client1.17", 2): _SERVED,
    ("status_client1.19", 1): _WORDS,
    ("version_client1.17", 0): Difference(
        "CNI version 1.1.0 is supported", 15, stdout={"supportedVersions": VERSIONS}
    ),
}
"""By recording and position of the command; a key with the value ``...`` must exist and is not compared."""

EVERYWHERE: Final = {
    "num_tx_queues": "one queue: a veth without NAPI does not use more",
    "num_rx_queues": "one queue: a veth without NAPI does not use more",
    "cniVersion": "errors have it, as the CNI specification requires",
}
"""Values that differ in every recording, and the reasons."""
