"""Lists intended differences of our plugin from the recorded one, and recordings that do not apply.

``correction`` is the number of the note that describes a leak, crash or missing feature of Cilium's plugin.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tests.support.recordings import INDEX

NO_HTTP: Final = "the recorded answer is wrong in a way that only HTTP makes possible"
CLOUD: Final = "the agent makes links and routes, and refuses clouds' IPAM at its start"

EXCLUDED: Final = {
    "add_agent_503": NO_HTTP,
    "add_eni_ipam": CLOUD,
    "add_eni_ipam_missing_master_mac": CLOUD,
    "add_netkit": "the agent makes the links, and refuses datapath-mode=netkit at its start",
    "fail_config_status_null": NO_HTTP,
    "fail_config_without_addressing": NO_HTTP,
    "fail_config_without_datapathmode_client1.17": NO_HTTP,
    "fail_config_without_datapathmode_client1.19": NO_HTTP,
    "fail_ipam_403_500": NO_HTTP,
    "fail_ipam_incomplete": NO_HTTP,
    "fail_put_timeout": "90 s of silence; an agent that is silent for less is in test_plugin_del",
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
_LEAK: Final = Difference("a failed ADD leaves no link", 7, clean=True)
_WORDS: Final = Difference("the agent's words, not those of an HTTP client", stdout={"details": ...})
_GO: Final = Difference("Go's words for what it could not parse", stdout={"msg": ...})
_SERVED: Final = Difference("STATUS is served, and true", 15, 0, "")
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
        "refused before anything is made; and the annotation is named",
        7,
        stdout={"details": ...},
        clean=True,
        earlier=True,
    ),
    ("chained_put_500", 1): _WORDS,
    ("check_failures", 1): _WORDS,
    ("check_failures", 2): _WORDS,
    ("check_failures", 3): _WORDS,
    ("del_netns_missing_client1.17", 0): Difference("DEL of a vanished namespace succeeds", 14, 0, ""),
    ("del_netns_missing_client1.17", 1): Difference("DEL without a namespace succeeds", 14, 0, ""),
    ("fail_put_4xx", 0): _LEAK,
    ("fail_put_4xx", 1): _LEAK,
    ("fail_put_4xx", 2): Difference(
        "a failed ADD leaves no link, and the agent's words are shown",
        7,
        stdout={"msg": "unable to create endpoint: Rate limiter: exceeded"},
        clean=True,
    ),
    ("fail_put_500_client1.17", 0): _LEAK,
    ("fail_put_500_client1.19", 0): Difference(
        "the agent's words, without the quotes of client 1.19",
        13,
        stdout={"msg": "unable to create endpoint: unable to create endpoint: build failed"},
    ),
    ("gc_client1.17", 0): Difference("GC is served, and real", 16, 0, ""),
    ("misc_invocation_client1.17", 4): Difference("1.1.0 is served", 15, stdout={"details": ...}),
    ("misc_invocation_client1.17", 10): _NO_RESULT,
    ("misc_invocation_client1.17", 11): _GO,
    ("misc_invocation_client1.19", 10): _NO_RESULT,
    ("misc_invocation_client1.19", 11): _GO,
    ("status_client1.17", 0): _SERVED,
    ("status_client1.17", 1): _SERVED,
    ("status_client1.17", 2): _SERVED,
    ("status_client1.19", 1): _WORDS,
    ("version_client1.17", 0): Difference("1.1.0 is served", 15, stdout={"supportedVersions": VERSIONS}),
}
"""By recording and position of the command; a key with the value ``...`` must exist and is not compared."""

EVERYWHERE: Final = {
    "num_tx_queues": "one queue: a veth without NAPI has no use for more",
    "num_rx_queues": "one queue: a veth without NAPI has no use for more",
    "cniVersion": "errors carry it, as the CNI specification wants",
}
"""Values that differ in every recording, and the reasons."""
