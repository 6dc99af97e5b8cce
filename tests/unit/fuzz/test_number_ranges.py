"""Every encoded number works over its whole range: maps, marks, netlink, Envoy, events.

The ranges are those of the protocols and of Cilium, not those of the code: identities of every scope,
endpoint ids and ports of 16 bits, indexes of links as the kernel gives them, marks of 32 bits, addresses of
both families. State files and monitor events have tests of their own (endpoint/test_state_files.py,
events/test_records.py, monitor/test_payload.py), marks of sockets in the kernel tier (sockets/test_marks.py).
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext, suppress
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, ip_address, ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.generic.wireguard import AsyncWireGuard, wgmsg

from cells.bgp import gobgp_messages
from cells.cluster.encryption import WIREGUARD_PORT
from cells.encryption.wireguard.control import KernelControl
from cells.encryption.wireguard.peers import PeerCall
from cells.hubble import flow
from cells.hubble.codec import WireMessage, members_of
from cells.hubble.codec import decode as read_message
from cells.hubble.codec import encode as write_message
from cells.hubble.rpc import observer
from cells.hubble.scalars import EnumType
from cells.maps.records import cluster, endpoints, flows
from cells.maps.records.cluster import (
    TUNNEL_OVER_IPV6,
    EgressKey,
    EgressValue,
    IpcacheKey,
    IpcacheValue,
    L2ResponderKey,
    NodeKey,
    NodeValue,
    TunnelConfig,
    TunnelKey,
    TunnelValue,
)
from cells.maps.records.endpoints import EndpointConfig, LxcKey, LxcValue, NodeConfig, PolicyEntry, PolicyKey
from cells.maps.records.flows import (
    CtEntry,
    CtKey,
    DeviceConfig,
    EncryptionConfig,
    FragmentPorts,
    MetricsKey,
    MetricsValue,
    NatEntry,
    NodePortConfig,
    ReverseSk,
    ReverseSkKey,
    SkipLbKey,
    SockConfig,
)
from cells.netlink import messages, overlay
from cells.netlink.network import FwmarkRule, rule
from cells.netlink.wire import Request, attributes, encode
from cells.netlink.wire import messages as in_datagram
from cells.netlink.xfrm import (
    Algorithm,
    Direction,
    KeyOctets,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
    XfrmTemplate,
    add_state,
    read_policy,
    read_state,
    set_policy,
)
from cells.observe.events.gob import INT, Type
from cells.observe.events.gob import decode as read_gob
from cells.observe.events.gob import encode as write_gob
from cells.policy.control import HTTPRedirect
from cells.proxy.envoy import EnvoySettings
from cells.proxy.envoy.resources import EGRESS_PROXY, INGRESS_PROXY, EnvoyFiles, listeners
from cells.services import map_entries


def unsigned(bits: int) -> st.SearchStrategy[int]:
    """Of so many bits, the ends of the range and its middle above all."""
    top = 1 << bits
    return st.sampled_from([0, 1, top // 2 - 1, top // 2, top - 1]) | st.integers(0, top - 1)


u8, u16, u24, u32, u64 = (unsigned(bits) for bits in (8, 16, 24, 32, 64))
ifindexes = st.sampled_from([1, (1 << 16) - 1, 1 << 16, (1 << 31) - 1]) | st.integers(1, (1 << 31) - 1)
pods = st.sampled_from([256, 32767, 32768, 65535, 1 << 16, 1 << 23, (1 << 24) - 1]) | st.integers(
    1, (1 << 24) - 1
)
identities = pods | st.sampled_from([0, 1 << 24, (1 << 25) - 1, 1 << 25, (1 << 32) - 1]) | u32
"""Of pods, also of other clusters; of networks; of other nodes."""
macs = st.binary(min_size=6, max_size=6)
ipv4, ipv6 = st.ip_addresses(v=4), st.ip_addresses(v=6)
addresses = ipv4 | ipv6
interfaces4 = st.builds(lambda ip, bits: IPv4Interface((ip, bits)), ipv4, st.integers(0, 32))
networks4 = st.builds(lambda ip, bits: ip_network((ip, bits), strict=False), ipv4, st.integers(0, 32))
networks6 = st.builds(lambda ip, bits: ip_network((ip, bits), strict=False), ipv6, st.integers(0, 128))

RECORDS: dict[Any, st.SearchStrategy[Any]] = {
    CtEntry: st.builds(
        CtEntry,
        **dict.fromkeys(("reserved", "backend_id", "packets", "octets"), u64),
        **dict.fromkeys(("lifetime", "last_tx_report", "last_rx_report"), u32),
        **dict.fromkeys(("flags", "rev_nat_index", "ifindex"), u16),
        **dict.fromkeys(("tx_flags_seen", "rx_flags_seen"), u8),
        source_identity=identities,
    ),
    CtKey: st.sampled_from([ipv4, ipv6]).flatmap(
        lambda family: st.builds(
            CtKey, daddr=family, saddr=family, dport=u16, sport=u16, protocol=u8, flags=u8
        )
    ),
    DeviceConfig: st.builds(
        DeviceConfig,
        mac=macs,
        ipv4=ipv4.filter(int),
        ipv6=ipv6.filter(int),
        native4=networks4.filter(lambda one: one.prefixlen),
        native6=networks6.filter(lambda one: one.prefixlen),
        flags=u32,
        announces=u32,
    ),
    EndpointConfig: st.builds(
        EndpointConfig,
        ipv4=ipv4.filter(int),
        endpoint_id=u16,
        identity=identities,
        host_mac=macs,
        pod_mac=macs,
        flags=u16,
        ipv6=ipv6.filter(int),
        netns_cookie=u64,
    ),
    FragmentPorts: st.builds(FragmentPorts, u16, u16),
    IpcacheKey: st.builds(IpcacheKey.of, networks4 | networks6),
    IpcacheValue: st.builds(IpcacheValue, identities, ipv4, u8, u8),
    EgressKey: st.builds(EgressKey, ipv4, interfaces4),
    EgressValue: st.builds(EgressValue, ipv4, ipv4),
    L2ResponderKey: st.builds(L2ResponderKey, ipv4, ifindexes),
    LxcKey: st.builds(LxcKey, addresses, u16),
    LxcValue: st.builds(LxcValue, ifindexes, u16, macs, macs, identities, u32),
    MetricsKey: st.builds(MetricsKey, u8, st.integers(0, 3), u16, u8),
    MetricsValue: st.builds(MetricsValue, u64, u64),
    NatEntry: st.builds(NatEntry, addresses, u16, u64, st.booleans()),
    NodeConfig: st.builds(
        NodeConfig,
        router_ip=ipv4.filter(int),
        host_ifindex=ifindexes,
        host_mac=macs,
        net_ifindex=ifindexes,
        net_mac=macs,
        pod_cidr=networks4.filter(lambda one: one.prefixlen),
        flags=u32,
        router_ip6=ipv6.filter(int),
        pod_cidr6=networks6.filter(lambda one: one.prefixlen),
        aggregation=u32,
        host_endpoint=u16,
    ),
    NodeKey: st.builds(NodeKey, addresses),
    EncryptionConfig: st.builds(EncryptionConfig, ifindexes, st.sampled_from((0, 1)), st.none(), ipv4, u16)
    | st.builds(EncryptionConfig, ifindexes, st.just(2), networks4, ipv4, u16),
    NodePortConfig: st.builds(NodePortConfig, u32, ipv4, ipv6, st.tuples(u32, u32)),
    NodeValue: st.builds(NodeValue, u16, u8),
    PolicyKey: st.builds(PolicyKey, identities, st.booleans(), st.integers(1, 255), u16, st.just(16)),
    ReverseSk: st.builds(ReverseSk, addresses, u16, u16),
    ReverseSkKey: st.builds(ReverseSkKey, u64, addresses, u16),
    SkipLbKey: st.builds(SkipLbKey, u64, addresses, u16),
    SockConfig: st.builds(SockConfig, u64, st.tuples(u16, u16), u32),
    TunnelConfig: st.one_of(
        st.builds(TunnelConfig, ifindexes, u32, u16, ipv4, u32.map(lambda flags: flags & ~TUNNEL_OVER_IPV6)),
        st.builds(TunnelConfig, ifindexes, u32, u16, ipv6, u32.map(lambda flags: flags | TUNNEL_OVER_IPV6)),
    ),
    TunnelKey: st.builds(TunnelKey, addresses, u16),
    TunnelValue: st.builds(TunnelValue, addresses, u8),
}


def test_every_record_of_a_map_is_drawn() -> None:
    there = {
        kind
        for records in (endpoints, flows, cluster)
        for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and hasattr(kind, "pack")
    }
    assert there - {PolicyEntry} == set(RECORDS)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_a_record_of_a_map_is_read_as_it_was_written(kind: type[Any], data: st.DataObject) -> None:
    record = data.draw(RECORDS[kind])
    assert kind.unpack(record.pack()) == record


@given(RECORDS[PolicyKey], u16, u8.filter(bool), u64, u64)
def test_an_entry_of_a_policy_is_read_as_it_was_written(
    key: PolicyKey, port: int, auth: int, packets: int, octets: int
) -> None:
    entry = PolicyEntry(proxy_port=port, auth_type=auth & 0x7F, packets=packets, octets=octets)
    assert PolicyEntry.unpack(entry.pack(key)) == entry


@given(u16, u32, u16, u8, networks4 | networks6, u16, u16)
def test_service_entries_survive_any_number(
    number: int, backend: int, count: int, algorithm: int, clients: Any, flags: int, port: int
) -> None:
    timeout = backend >> 8
    master = map_entries.master_value(
        count=count, quarantined=count, number=number, flags=flags, timeout=timeout, algorithm=algorithm
    )
    union, counted, index, flagged, quarantined = struct.unpack("<IH2sHH", master)
    assert (union, counted, flagged, quarantined) == (timeout | algorithm << 24, count, flags, count)
    assert int.from_bytes(index, "big") == number
    served = map_entries.master_value(count=1, quarantined=0, number=1, flags=0, proxy_port=port)
    assert int.from_bytes(served[:2], "big") == port
    assert int.from_bytes(map_entries.backend_number(backend), "little") == backend
    for version in (4, 6):
        assert int.from_bytes(map_entries.reverse_nat_key(number, version).key, "big") == number
        assert int.from_bytes(map_entries.maglev_key(number, version).key, "big") == number
    assert struct.unpack("<I", map_entries.affinity_key(number, backend).key[:4]) == (backend,)
    assert map_entries.source_range_key(number, clients).key.endswith(clients.network_address.packed)


@given(pods, u16, st.sampled_from(["ingress", "egress"]))
def test_the_mark_and_the_port_that_envoy_is_given(identity: int, port: int, direction: Any) -> None:
    redirect = HTTPRedirect(
        name="one", port=port, direction=direction, identity=identity, labels=(), rules=None
    )
    (listener,) = listeners([redirect], EnvoySettings(), EnvoyFiles(Path("/run/envoy")), ["127.0.0.1", "::1"])
    mark = listener["listener_filters"][1]["typed_config"]["mark"]
    assert listener["address"]["socket_address"]["port_value"] == port
    assert 0 <= mark < 1 << 32, "a uint32 of the protocol"
    if direction == "ingress":
        assert mark == INGRESS_PROXY
    else:
        assert (mark & 0x0F00, mark >> 16 | (mark & 0xFF) << 16) == (EGRESS_PROXY, identity)


def requests(ifindex: int, number: int, address: IPv4Address | IPv6Address, mac: bytes) -> Iterator[Request]:
    """One of each kind of request, of this link."""
    network = ip_network(address)
    descriptor = number & 0x7FFFFFFF
    yield messages.get_link_at(ifindex)
    yield messages.sync_carrier(ifindex)
    yield messages.activate_link(ifindex, "alias")
    yield messages.link_up(ifindex, "link")
    yield messages.set_mac(ifindex, "link", mac)
    yield messages.set_device(ifindex, "link", number)
    yield messages.set_mtu(ifindex, number)
    yield messages.set_group(ifindex, number)
    yield messages.delete_group(number)
    yield messages.delete_link(ifindex)
    yield messages.add_address(ifindex, "link", address)
    yield messages.add_route(ifindex, network, via=address, source=address, mtu=number)
    yield messages.dump_routes(messages.family_of(address), ifindex)
    yield messages.set_neighbour(ifindex, address, mac)
    yield messages.delete_route(ifindex, network)
    yield messages.add_clsact(ifindex)
    yield messages.replace_filter(ifindex, number, descriptor, "program")
    yield messages.delete_filter(ifindex, number)
    yield messages.dump_filters(ifindex, number)
    yield messages.set_xdp(ifindex, -1 if number % 2 else descriptor, generic=True, instead_of=descriptor)
    for kind in ("vxlan", "geneve"):
        yield overlay.new_overlay(kind, "tunnel", number, number & 0xFFFF, (number & 0xFFFF, 0xFFFF))
    yield overlay.mtu_and_up(ifindex, "tunnel", number)
    yield rule(32, 0, FwmarkRule(number, number, number, number), messages.family_of(address), ())


@given(ifindexes, u32, addresses, macs, unsigned(31))
def test_netlink_requests_accept_any_number_in_range(
    ifindex: int, number: int, address: IPv4Address | IPv6Address, mac: bytes, sequence: int
) -> None:
    asked = list(requests(ifindex, number, address, mac))
    written = list(in_datagram(encode(asked, sequence)))
    assert [one.body for one in written] == [one.body for one in asked]
    (mtu,) = (data for kind, data in attributes(messages.set_mtu(ifindex, number).body, 16) if kind == 4)
    assert struct.unpack("=I", mtu) == (number,)


@given(st.integers(-(1 << 63), (1 << 63) - 1) | u32)
def test_request_events_accept_any_number_in_range(number: int) -> None:
    types = {65: Type("Numbers", {"Number": INT})}
    assert read_gob(write_gob(types, {"Number": number})) == ({"Number": number} if number else {})


keys = st.builds(KeyOctets, st.binary(min_size=1, max_size=36))
marks = st.builds(XfrmMark, u32, u32)


@st.composite
def states(draw: st.DrawFn) -> XfrmState:
    family = draw(st.sampled_from([ipv4, ipv6]))
    aead = draw(st.none() | st.builds(Algorithm, st.just("rfc4106(gcm(aes))"), keys, u32))
    plain = st.builds(Algorithm, st.sampled_from(["hmac(sha256)", "cbc(aes)"]), keys)
    return XfrmState(
        source=draw(family),
        destination=draw(family),
        spi=draw(u32),
        mark=draw(marks),
        output_mark=draw(marks),
        aead=aead,
        auth=None if aead else draw(plain),
        crypt=None if aead else draw(plain),
        extended=draw(st.booleans()),
    )


@st.composite
def xfrm_policies(draw: st.DrawFn) -> XfrmPolicy:
    family, network = draw(st.sampled_from([(ipv4, networks4), (ipv6, networks6)]))
    ends = st.none() | family.filter(int)
    return XfrmPolicy(
        direction=draw(st.sampled_from(Direction)),
        source=draw(network),
        destination=draw(network),
        mark=draw(st.none() | marks.filter(lambda one: one.value or one.mask)),
        priority=draw(u32),
        block=draw(st.booleans()),
        templates=tuple(
            draw(st.lists(st.builds(XfrmTemplate, ends, ends, u32, u32, st.booleans()), max_size=2))
        ),
    )


@given(states(), xfrm_policies())
def test_states_and_policies_of_xfrm_are_read_as_they_were_written(
    state: XfrmState, policy: XfrmPolicy
) -> None:
    assert read_state(add_state(state).body) == state
    assert read_policy(set_policy(policy).body) == policy


class Overheard(AsyncWireGuard):  # type: ignore[misc]  # of a library without hints
    """What pyroute2 would send to the kernel."""

    prid, pid = 0x1F, 1
    sent: ClassVar[list[bytes]] = []

    def __init__(self) -> None:
        """There is no socket."""

    def sendto(self, data: bytes, _: object) -> None:
        self.sent.append(bytes(data))

    async def get(self) -> AsyncIterator[Any]:
        yield {"header": {"error": None}}


@given(
    *(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), u16, u32),
    *(addresses, st.frozensets(networks4 | networks6, max_size=5), unsigned(16)),
)
def test_a_device_of_wireguard_is_read_as_it_was_written(
    private: bytes, key: bytes, port: int, mark: int, endpoint: Any, allowed: Any, keepalive: int
) -> None:
    def info(_: str) -> Iterator[Any]:
        for data in Overheard.sent:
            found = wgmsg(data)
            found.decode()
            yield found

    control, overheard = KernelControl("cilium_wg0"), Overheard()

    def change(*args: object, **given: object) -> None:
        with suppress(StopIteration):  # it waits for nothing
            overheard.set(*args, **given).send(None)

    wireguard = SimpleNamespace(set=change, info=info)
    Overheard.sent.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cells.encryption.wireguard.control._generic", lambda _: nullcontext(wireguard))
        control.configure_self(private, port, mark)
        control.configure(PeerCall(key, endpoint, allowed, keepalive))
        state = control.read()
    (peer,) = state.peers.values()
    assert (state.private, state.port, state.mark, list(state.peers)) == (private, port, mark, [key])
    host, _, number = peer.endpoint.rpartition(":")
    assert (ip_address(host.strip("[]")), int(number), peer.allowed) == (endpoint, WIREGUARD_PORT, allowed)


def edges(kind: Any) -> Iterator[int]:
    """The ends and the middle of the range of a number of a message."""
    bits = int(kind.name.lstrip("uint")) if kind.name else 32
    signed = isinstance(kind, EnumType) or not kind.name.startswith("u")
    yield from {-1 << bits - 1, -1, (1 << bits - 1) - 1} if signed else {1 << bits - 1, (1 << bits) - 1}
    yield from (1, 127, 128, (1 << bits - 1) - 1)


def test_numbers_of_messages_of_hubble_and_gobgpd() -> None:
    """Each field of each message that has a number in it."""
    drawn = 0
    for module in (flow, observer, gobgp_messages):
        for message in vars(module).values():
            if not (isinstance(message, type) and issubclass(message, WireMessage) and message.protobuf):
                continue
            for member in members_of(message):
                if not member.type.name.startswith(("int", "uint")) and not isinstance(member.type, EnumType):
                    continue
                for number in edges(member.type):
                    value = (number, number) if member.repeated else number
                    made = message(**{member.name: value})
                    assert read_message(message, write_message(made)) == made, (message, member.name, number)
                    drawn += 1
    assert drawn > 500
