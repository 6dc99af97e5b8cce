"""Two nodes exchange ESP packets by their plans, with a fake of the kernel's XFRM.

scapy encrypts, and the ESP code of kernel tests decrypts, so an error in one is detected by the other.
"""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from cells.base.addresses import Family
from tests.support.esp import seal
from tests.unit.encryption.esp_pair import (
    FIRST,
    LONG,
    ROTATION,
    SECOND,
    Pair,
    association,
    datagram,
    mark_for,
)

pytestmark = pytest.mark.anyio


async def test_the_double_seals_what_scapy_reads_at_every_length() -> None:
    pair = Pair(tunnel=False)
    await pair.load(pair.first, FIRST)
    for state in pair.first.kernel.held_states.values():
        kind = IP if state.source.version == 4 else IPv6
        outside = kind(
            src=str(state.source), dst=str(state.destination), **{"proto" if kind is IP else "nh": 50}
        )
        for length in range(8):
            inside = bytes(IP(src="10.0.1.9", dst="10.0.2.9") / UDP() / Raw(bytes(length)))
            packet = kind(bytes(outside / Raw(seal(state, length + 1, inside))))
            assert bytes(association(state, length + 1).decrypt(packet)) == inside


@pytest.mark.parametrize("tunnel", [False, True])
async def test_each_node_reads_what_the_other_encrypts_and_nothing_leaves_in_clear(tunnel: bool) -> None:
    for text, spi in ((FIRST, 3), (LONG, 5)):
        pair = Pair(tunnel=tunnel)
        for node in (pair.first, pair.second):
            await pair.load(node, text)
        for sender, receiver, family in pair.ways():
            assert pair.arrives(sender, receiver, family, spi)
            data = pair.encrypted(sender, receiver, family, spi)
            assert data is not None
            outside = IP(data) if family is Family.IPV4 else IPv6(data)
            ends = sender.node.router_ip(family), receiver.node.router_ip(family)
            assert (ip_address(outside.src), ip_address(outside.dst)) == ends
            changed = bytes([*data[:-1], data[-1] ^ 1])
            assert receiver.receive(changed, pair.numbers[sender]) is None
            assert receiver.receive(data, pair.numbers[sender] + 1) is None, "a node's state reads another's"
            packet = datagram(sender.number, receiver.number, family)
            assert sender.send(packet, mark_for(9, spi)) is None, "for a node without states"
            assert sender.send(packet, mark_for(pair.numbers[receiver], 9)) is None, "of a key without states"


async def test_a_key_is_replaced_without_a_packet_lost() -> None:
    pair = Pair(tunnel=False)
    for node in (pair.first, pair.second):
        await pair.load(node, FIRST)

    def all_arrive(spi: int) -> bool:
        return all(pair.arrives(*way, spi) for way in pair.ways())

    assert all_arrive(3)
    on_its_way = pair.encrypted(pair.first, pair.second, Family.IPV4, 3)
    assert on_its_way is not None
    await pair.load(pair.second, SECOND)
    assert all_arrive(3), "while one of them does not have the new key"
    await pair.load(pair.first, SECOND)
    assert all_arrive(3)
    assert all_arrive(4)
    for node in (pair.first, pair.second):
        node.now += ROTATION - 1
    await pair.reconcile(pair.first, pair.second)
    assert pair.second.receive(on_its_way, pair.numbers[pair.first]) is not None
    for node in (pair.first, pair.second):
        node.now += 2
    await pair.reconcile(pair.first, pair.second)
    assert all_arrive(4)
    assert pair.second.receive(on_its_way, pair.numbers[pair.first]) is None
    assert not any(pair.arrives(*way, 3) for way in pair.ways())


async def test_a_node_that_boots_again_gets_keys_of_its_own() -> None:
    pair = Pair(tunnel=True)
    for node in (pair.first, pair.second):
        await pair.load(node, FIRST)
    before = pair.encrypted(pair.first, pair.second, Family.IPV4, 3)
    assert before is not None
    pair.second.boot = "33333333-3333-4333-8333-333333333333"
    await pair.reconcile(pair.second)
    assert not any(pair.arrives(*way, 3) for way in pair.ways())
    await pair.reconcile(pair.first)
    assert all(pair.arrives(*way, 3) for way in pair.ways())
    assert pair.second.receive(before, pair.numbers[pair.first]) is None
