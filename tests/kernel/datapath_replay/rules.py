"""Rules for the recordings that are not replayed, with reasons: by content, never by name."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Final

from tests.kernel.datapath_replay.recordings import OK, Recording

PROGRAMS: Final = {
    "from-container": "hive_from_pod",
    "to-container": "hive_to_pod",
    "from-host": "hive_from_host",
    "to-overlay": "hive_to_vxlan",
    "cil_from_overlay": "hive_from_vxlan",
    "from-netdev": "hive_from_device",
    "cil_from_network": "hive_from_device",
    "to-netdev": "hive_to_device",
    "xdp": "hive_xdp",
    "snat-step (reverse": "hive_from_device",
    "snat-step (forward": "hive_to_device",
}
"""Our programs, by the hook of Cilium's; for a single step, by the step."""

_PLACES: Final = (
    ("endpoint", "the destination's policy is decided in the sender's program: no tail call to replay"),
)
_SWITCHES: Final = (
    ("ENABLE_SRV6", "SRv6: not built"),
    ("ENABLE_CLUSTER_AWARE_ADDRESSING", "overlapping clusters: not built"),
    ("ENABLE_HEALTH_CHECK", "probes of backends by IPIP: not built"),
)

_TTL_AT, _NEXT_HEADER_AT = 22, 20
_IPV4: Final = bytes.fromhex("0800")
_IPV6: Final = bytes.fromhex("86dd")
_FRAGMENT_HEADER: Final = 44
_TTL_EXCEEDED: Final = 196
_PROXY_MAGIC, _EGRESS_GATEWAY, _DECRYPTED, _MAGIC = 0x0200, 0x0500, 0x0D00, 0x0F00


def program_of(recording: Recording) -> str:
    """Return our program with the recorded function; empty if there is none."""
    hook = str(recording.data["program"]["hook"])
    if is_gateway_translation(recording):
        return PROGRAMS["cil_from_overlay"]
    found = next((ours for theirs, ours in PROGRAMS.items() if hook.startswith(theirs)), "")
    return found.replace("device", "l3_device") if recording.l3 else found


def reason_not_to_replay(recording: Recording) -> str | None:
    """Return the reason, or None to replay the recording."""
    return next(_reasons(recording), None)


def is_gateway_translation(recording: Recording) -> bool:
    """Return whether a device translates marked egress gateway traffic: ours does it at the tunnel."""
    return recording.mark & _MAGIC == _EGRESS_GATEWAY and recording.packet_after != recording.packet


def leaves_by_gateway(recording: Recording) -> bool:
    """Return whether a packet from the tunnel leaves the cluster by this node."""
    arrives = "ENABLE_EGRESS_GATEWAY" in recording.switches and recording.hook == "cil_from_overlay"
    sent_on = recording.mark_after & _MAGIC == _EGRESS_GATEWAY and not recording.dropped
    return is_gateway_translation(recording) or (arrives and sent_on)


def _reasons(recording: Recording) -> Iterator[str]:
    yield from (reason for place, reason in _PLACES if recording.hook == place)
    if not program_of(recording):
        yield f"attached at {recording.hook}: no program of ours is there"
    yield from (reason for switch, reason in _SWITCHES if switch in recording.switches)
    yield from (reason for reason, holds in _DIFFERENCES if holds(recording))


def _to_proxy(recording: Recording) -> bool:
    """Return whether bpf_sk_assign gives it to a proxy, which a single program's run cannot do."""
    return recording.verdict == OK and recording.mark_after & _MAGIC == _PROXY_MAGIC


def _answers_itself(recording: Recording) -> bool:
    loopback = IPv4Address(recording.constants.get("IPV4_LOOPBACK", "0.0.0.0")).packed
    to_loopback = recording.framed[30:34] == loopback != bytes(4)
    return recording.hook == "from-container" and not _is_ipv6(recording) and to_loopback


def _fragment6(recording: Recording) -> bool:
    return _is_ipv6(recording) and recording.framed[_NEXT_HEADER_AT] == _FRAGMENT_HEADER


def _used_up_on_the_way_off(recording: Recording) -> bool:
    if recording.hook != "from-container" or _is_ipv6(recording):
        return False
    return recording.framed[_TTL_AT] <= 1 and _leaves_the_node(recording)


def _asks_a_device_for_a_pod(recording: Recording) -> bool:
    return recording.hook == "from-netdev" and recording.area == "ndp" and recording.verdict != OK


def _fragmentation_needed(recording: Recording) -> bool:
    icmp, kind = recording.framed[23:24] == b"\x01", recording.framed[34:36]
    return recording.hook == "from-container" and not _is_ipv6(recording) and icmp and kind == b"\x03\x04"


def _reported_by_geneve(recording: Recording) -> bool:
    chosen, geneve = (recording.constants.get(f"DSR_ENCAP_{name}") for name in ("MODE", "GENEVE"))
    return chosen is not None and bool(chosen == geneve)


def _tunnel_encrypted(recording: Recording) -> bool:
    return recording.hook == "to-netdev" and "ENABLE_IPSEC" in recording.switches


def _decrypted_with_endpoint_routes(recording: Recording) -> bool:
    on = recording.switches >= {"ENABLE_IPSEC", "ENABLE_ENDPOINT_ROUTES"}
    return on and recording.mark & _MAGIC == _DECRYPTED


_DIFFERENCES: Final = (
    ("packets of the tunnel encrypted as a whole: not built", _tunnel_encrypted),
    (
        "what was decrypted goes to pods by programs also where each has a route of its own",
        _decrypted_with_endpoint_routes,
    ),
    ("DSR by Geneve: not built", _reported_by_geneve),
    ("native devices do not answer for pods: routes lead to those", _asks_a_device_for_a_pod),
    ("path MTU discovery passes policy about the pod's own flows only", _fragmentation_needed),
    ("a proxy gets a packet by its socket, which no run of a single program assigns", _to_proxy),
    ("a pod's answer to itself gets its addresses in one program, not in the next", _answers_itself),
    ("IPv6 fragments are tracked as IPv4's are, not refused", _fragment6),
    (
        "a TTL that ends on the way off the node: the stack answers (RFC 1812), Cilium is silent",
        _used_up_on_the_way_off,
    ),
)


def _is_ipv6(recording: Recording) -> bool:
    return recording.framed[12:14] == _IPV6


def _leaves_the_node(recording: Recording) -> bool:
    """Return whether the packet's destination is none of the node's pods."""
    if recording.tunnel_keys or recording.framed[12:14] != _IPV4:
        return False
    return not _is_for_a_pod(recording)


def _is_for_a_pod(recording: Recording) -> bool:
    packet = recording.framed
    destination = packet[38:54] if _is_ipv6(recording) else packet[30:34].ljust(16, b"\0")
    return any(key[:16] == destination for key, _, _ in recording.before("cilium_lxc"))
