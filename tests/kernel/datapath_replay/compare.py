"""Where our program did otherwise than Cilium's: in words, one for each difference.

What is not compared, because ours differs on purpose:

* packets and bytes of conntrack entries: released 1.17 leaves them 0 too (bpf-conntrack-accounting is false);
* times, but for a flow's own lifetime: the entry for ICMP errors about a flow lives as long as the flow may;
* TCP flags seen that monitor-aggregation-flags does not name (SYN, FIN and RST are the agent's default);
* forwarded packets in cilium_metrics: ours counts each once, where it leaves;
* the hop of a packet that goes to the stack, and its destination's MAC: the stack counts hops itself;
* the MACs of what passes between cilium_host and cilium_net: ours are those of the two;
* the entry of the pod that gets the packet: its policy is asked in the sender's program;
* the mark of a packet that is delivered on the node: no program reads it any more;
* the checksum of an ICMP error with a translated quote: theirs is not changed by a port, ours is;
* the hop to an IPv6 backend that answers directly: Cilium does not count it, RFC 8200 does;
* whether the entry of a packet that a proxy has let in is marked: ours is, so that answers find it;
* the entry of a service that redirects locally, but not this pod: ours makes none, as nothing is translated;
* the MAC of a client by a device that knows none: Cilium notes what lies where it would be;
* the port that a translated flow gets, and what of the packet follows from it: it is random;
* at which of two programs an egress gateway translates what comes out of the tunnel: ours does in the first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address

from tests.kernel.datapath_overlay.recorder import Tunnelled
from tests.kernel.datapath_replay.node import (
    AFFINITY,
    CONNTRACK,
    NAT,
    NEIGHBOURS,
    Replayed,
    clock,
    destinations,
)
from tests.kernel.datapath_replay.recordings import LIFETIME_AT, OK, XDP_REDIRECT, Json, Recording
from tests.kernel.datapath_replay.rules import leaves_by_gateway

FLAGS_AT, REV_NAT_AT, TX_SEEN_AT, RX_SEEN_AT, IDENTITY_AT, BACKEND_AT = 36, 38, 42, 43, 44, 8
PUBLIC_FLAGS = 0x07FF
REPORTED = 0x07  # FIN, SYN, RST
CT_IN, CT_RELATED, CT_SERVICE = 1, 2, 4
SKIPPED = ("cilium_skip_lb4", "cilium_skip_lb6")
PROXY_REDIRECT = 0x40
MARK_KIND, MARK_INGRESS_PROXY = 0x0F00, 0x0A00
NAT_IN, NAT_ADDRESS_AT = 1, 32
ICMP = 1
REMOTE_NODE = 6
ICMPV6 = 58
IPV4 = b"\x08\x00"
IPV6 = b"\x86\xdd"
TRANSLATED = (
    {IPV4: slice(34, 36), IPV6: slice(54, 56)},
    {IPV4: slice(50, 52), IPV6: slice(70, 72)},
)
"""Source port and checksum of TCP in a frame."""
HOP_LIMIT = slice(21, 22)
"""Position in an IPv6 frame."""
MACS, HOPS_TO_CHECKSUM = slice(0, 12), slice(22, 26)
"""Of an IPv4 packet, in a frame; the protocol is between hops and checksum."""
ERROR_CHECKSUM = slice(36, 38)
"""Position of an ICMP error's checksum in a frame."""


def differences(recording: Recording, replayed: Replayed) -> list[str]:
    """Return the differences as text; empty if both programs did the same."""
    if leaves_by_gateway(recording):
        return [*_gateway(recording, replayed)]
    return [*_verdict(recording, replayed), *_packet(recording, replayed), *_tables(recording, replayed)]


def _verdict(recording: Recording, replayed: Replayed) -> Iterator[str]:
    yield from _unequal("verdict", replayed.verdict, recording.verdict)
    yield from _unequal("drop reasons", replayed.drop_reasons, recording.drop_reasons)
    keys = [
        Tunnelled(
            *(identity_of(each["vni"], recording), IPv4Address(each["remote_ipv4_host_order"])),
            *(each["ttl"], each["size"], each["flags"]),
        )
        for each in recording.tunnel_keys
    ]
    yield from _unequal("tunnel key", replayed.tunnelled, keys[-1] if keys else None)
    sent = [each["ifindex"] for each in recording.data["result"]["redirects"] if each["call"] == "redirect"]
    if (recording.hook.endswith("-netdev") or recording.verdict == XDP_REDIRECT) and sent and not keys:
        found = replayed.redirected
        yield from _unequal("redirected to", found and found.ifindex, sent[-1])


def _gateway(recording: Recording, replayed: Replayed) -> Iterator[str]:
    """Combine Cilium's two programs: a redirect to the egress address's device, and the translation there."""
    ((_, policy, _),) = recording.before("cilium_egress_gw_policy_v4")
    sent, ours, theirs = replayed.redirected, replayed.packet, recording.packet_after
    yield from _unequal("drop reasons", replayed.drop_reasons, recording.drop_reasons)
    yield from _unequal("leaves by", sent and sent.ifindex, recording.sent_by)
    yield from _unequal("IP checksum", checksum(ours[14:34]), 0)
    theirs = theirs[:26] + policy[:4] + theirs[30:]
    for part in (MACS, HOPS_TO_CHECKSUM, *(random[IPV4] for random in TRANSLATED)):
        ours, theirs = without(ours, part), without(theirs, part)
    yield from _unequal("packet", ours.hex(), theirs.hex())
    if recording.verdict == OK:
        yield from _tables(recording, replayed)
        return
    found = translations(NAT[0], replayed.tables[NAT[0]])
    yield from _unequal("translated to", [address for _, address in found], [policy[:4]])


def identity_of(vni: int, recording: Recording) -> int:
    """Return the identity in a tunnel: for a device remote-node, as other nodes see this one."""
    at_device = recording.hook.endswith("-netdev")
    return REMOTE_NODE if at_device and vni == int(recording.constants["SECLABEL"]) else vni


def _packet(recording: Recording, replayed: Replayed) -> Iterator[str]:
    if recording.dropped:
        return
    ours, theirs = replayed.packet, recording.packet_after
    to_host_link = goes_to_host_link(recording)
    if (recording.verdict == OK and recording.hook != "xdp") or to_host_link:
        theirs = without_hop(theirs, recording.packet)
        theirs = ours[:6] + theirs[6:] if recording.hook == "from-host" else theirs
        theirs = ours[:12] + theirs[12:] if to_host_link else theirs
        if recording.hook != "snat-step":
            yield from _unequal("mark", hex(replayed.mark), hex(recording.mark_after))
    if "ENABLE_DSR" in recording.switches and theirs[12:14] == IPV6:
        ours, theirs = without(ours, HOP_LIMIT), without(theirs, HOP_LIMIT)
    for each in recording.data["volatile"]:
        if each["in"] == "result.packet":
            at = slice(each["offset"], each["offset"] + each["length"])
            ours, theirs = without(ours, at), without(theirs, at)
    for random in TRANSLATED if recording.l3 else ():  # recorded once, so that this does not show
        part = random[theirs[12:14]]
        ours, theirs = without(ours, part), without(theirs, part)
    if recording.hook == "snat-step":
        ours, theirs = without(ours, ERROR_CHECKSUM), without(theirs, ERROR_CHECKSUM)
    if is_error(theirs) and not is_error(recording.packet):
        yield from _error(ours, theirs, recording.packet)
    else:
        yield from _unequal("packet", ours.hex(), theirs.hex())


def goes_to_host_link(recording: Recording) -> bool:
    """Return whether the packet goes to the stack by cilium_host: from the tunnel, or to a proxy."""
    if recording.goes_to_proxy:
        return True
    out_of_tunnel = recording.hook == "cil_from_overlay" and not any(True for _ in destinations(recording))
    return out_of_tunnel and recording.sent_by == recording.constants["HOST_IFINDEX"]


def without(packet: bytes, part: slice) -> bytes:
    """Return the packet with zeros there."""
    return packet[: part.start] + bytes(part.stop - part.start) + packet[part.stop :]


def is_error(packet: bytes) -> bool:
    """Return whether it is an ICMP error: Destination Unreachable or Time Exceeded."""
    if packet[12:14] == IPV4:
        return packet[23] == ICMP and packet[34] in {3, 11}
    return packet[12:14] == IPV6 and packet[20] == ICMPV6 and packet[54] in {1, 3}


def _error(ours: bytes, theirs: bytes, about: bytes) -> Iterator[str]:
    """Compare ICMP errors that quote the packet, whatever the length of the quote."""
    yield from _unequal("MACs", ours[:14].hex(), theirs[:14].hex())
    if ours[12:14] == IPV6:
        yield from _unequal("addresses and hops", ours[20:54].hex(), theirs[20:54].hex())
        yield from _unequal("type and code", ours[54:56].hex(), theirs[54:56].hex())
        yield from _unequal("quote", ours[62:].hex(), about[14 : 14 + len(ours[62:])].hex())
        length = struct.pack(">II", len(ours) - 54, ICMPV6)
        yield from _unequal("ICMP checksum", checksum(ours[22:54] + length + ours[54:]), 0)
        return
    yield from _unequal("addresses and hops", ours[22:24] + ours[26:34], theirs[22:24] + theirs[26:34])
    yield from _unequal("type and code", ours[34:36].hex(), theirs[34:36].hex())
    yield from _unequal("quote", ours[42:].hex(), about[14 : 14 + len(ours[42:])].hex())
    for name, part in ("IP", ours[14:34]), ("ICMP", ours[34:]):
        yield from _unequal(f"{name} checksum", checksum(part), 0)


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071); it is 0 over data with a valid checksum."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return ~total & 0xFFFF


def without_hop(packet: bytes, before: bytes) -> bytes:
    """Return the packet with the original hop limit and MAC, which the stack will change itself."""
    changed = bytearray(packet)
    changed[0:6] = before[0:6]
    if packet[12:14] != IPV4:
        changed[21] = before[21]
    elif packet[22] != before[22]:
        changed[22] = before[22]
        check = struct.unpack_from(">H", changed, 24)[0] - 0x0100 * (before[22] - packet[22])
        struct.pack_into(">H", changed, 24, check % 0xFFFF)
    return bytes(changed)


def _conntrack(recording: Recording, replayed: Replayed) -> Iterator[str]:
    to_pods = any(True for _ in destinations(recording))
    for name in CONNTRACK:
        theirs = recording.after(name)
        ours = dict(replayed.tables[name])
        if recording.hook in {"from-container", "from-netdev", "cil_from_overlay"} and to_pods:
            ours = {key: row for key, row in ours.items() if not key[-1] & CT_IN or key in theirs}
        if any(True for skipped in SKIPPED for _ in recording.before(skipped)):
            theirs = {key: row for key, row in theirs.items() if not key[-1] & CT_SERVICE or key in ours}
        for key in sorted(ours.keys() - theirs.keys()):
            yield f"{name}: {key.hex()} is not in the recording"
        for key in sorted(theirs.keys() - ours.keys()):
            yield f"{name}: {key.hex()} is missing"
        for key in sorted(theirs.keys() & ours.keys()):
            value, decoded = theirs[key]
            own = ours[key]
            if recording.mark & MARK_KIND == MARK_INGRESS_PROXY:
                own = without_flag(own, PROXY_REDIRECT)
            found = entry_fields(key, own, replayed.now)
            wanted = entry_fields(key, value, replayed.now, decoded["value"])
            yield from _unequal(f"{name}: {key.hex()}", found, wanted)


def _tables(recording: Recording, replayed: Replayed) -> Iterator[str]:
    yield from _conntrack(recording, replayed)
    for name in NAT:
        yield from _unequal(name, *(translations(name, rows) for rows in nat_rows(name, recording, replayed)))
    for name in AFFINITY:
        clients = {key: value[8:] for key, (value, _) in recording.after(name).items()}
        yield from _unequal(name, {key: value[8:] for key, value in replayed.tables[name].items()}, clients)
    for name in NEIGHBOURS:  # Cilium notes them always; of ours those in drivers alone ask for them
        noted = {key: value for key, value, _ in recording.before(name)}
        if recording.hook == "xdp":
            noted = {key: value for key, (value, _) in recording.after(name).items()}
        yield from _unequal(name, replayed.tables[name], noted)
    fragments = "cilium_ipv4_frag_datagrams"
    recorded = {key: value for key, (value, _) in recording.after(fragments).items()}
    yield from _unequal(fragments, replayed.tables[fragments], recorded)


def nat_rows(name: str, recording: Recording, replayed: Replayed) -> Iterator[Mapping[bytes, bytes]]:
    """Return our rows, then theirs."""
    yield replayed.tables[name]
    yield {key: value for key, (value, _) in recording.after(name).items()}


def translations(name: str, rows: Mapping[bytes, bytes]) -> set[tuple[bytes, bytes]]:
    """Return which flows are translated to which address; each has two entries with one port.

    A flow that a backend answers directly has one entry, and its port is compared: the service's.
    """
    size = 4 if "_v4_" in name else 16
    found = set()
    answers = 0
    for key, value in rows.items():
        if key[-1] == NAT_IN:
            continue
        destination, dport, protocol = key[:size], key[2 * size : 2 * size + 2], key[-2:-1]
        address, port = value[NAT_ADDRESS_AT:][:size], value[NAT_ADDRESS_AT + size :][:2]
        answer = address + destination + port + dport + protocol + bytes([NAT_IN])
        if answer in rows:
            answers += 1
            source = rows[answer][NAT_ADDRESS_AT:][: size + 2]
            assert source == key[size : 2 * size] + key[2 * size + 2 : 2 * size + 4]
            found.add((key, address))
        else:
            found.add((key, address + port))
    assert len(rows) == len(found) + answers
    return found


def without_flag(value: bytes, flag: int) -> bytes:
    """Return the conntrack entry without one of its flags."""
    (flags,) = struct.unpack_from("<H", value, FLAGS_AT)
    return value[:FLAGS_AT] + struct.pack("<H", flags & ~flag) + value[FLAGS_AT + 2 :]


def entry_fields(key: bytes, value: bytes, now: int, decoded: Json = None) -> dict[str, int | str]:
    """Return the compared fields of a conntrack entry. ``decoded``: the recorder's, with relative times."""
    (flags,) = struct.unpack_from("<H", value, FLAGS_AT)
    (lifetime,) = struct.unpack_from("<I", value, LIFETIME_AT)
    if decoded is not None:
        lifetime = clock(decoded["lifetime"], now)
    fields: dict[str, int | str] = {
        "flags": hex(flags & PUBLIC_FLAGS),
        "rev_nat_index": value[REV_NAT_AT : REV_NAT_AT + 2].hex(),
        "tx_flags_seen": value[TX_SEEN_AT] & REPORTED,
        "rx_flags_seen": value[RX_SEEN_AT] & REPORTED,
        "source_identity": struct.unpack_from("<I", value, IDENTITY_AT)[0],
        "backend_id": struct.unpack_from("<Q", value, BACKEND_AT)[0],
    }
    if not key[-1] & CT_RELATED:
        fields["lifetime"] = round((lifetime - now - 2) / 20) * 20  # seconds may pass meanwhile
    return fields


def _unequal(what: str, ours: object, theirs: object) -> Iterator[str]:
    if ours != theirs:
        yield f"{what}: {ours}, recorded {theirs}"
