"""gobgpd is reconciled to the desired state from any earlier state; each fault is one clear line."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec.structs import asdict

from cells.base.addresses import IPNetwork
from cells.bgp import FOLDER, SpeakerSettings
from cells.bgp import gobgp_messages as api
from cells.bgp.gobgp_facts import policy_rules
from cells.bgp.gobgpd import GobgpError, GobgpUnreachableError, connected
from cells.bgp.isolation import WantedSpeaker, wanted_speakers
from cells.bgp.speaker_processes import SpeakerError, Speakers, end_speakers
from cells.bgp.speaker_state import (
    ALLOW_LOCAL,
    IPV4_UNICAST,
    IPV6_UNICAST,
    AfiSafi,
    AnnouncedPath,
    BGPInstance,
    BGPPeer,
    PeerRestart,
    PeerTimers,
    PolicyDirection,
    PolicyStatement,
    PrefixMatch,
    RoutePolicy,
    SpeakerName,
)
from cells.bgp.speaker_target import SpeakerTarget
from lifecycle import BatchError, Secret
from tests.support.bgp import gobgpd_pids
from tests.support.examples import scaled
from tests.unit.bgp.replay import NODE, Played

pytestmark = pytest.mark.anyio

EDGE = "edge"
NAME = SpeakerName(EDGE)
ADDRESSES = [ip_address(one) for one in ("192.0.2.1", "192.0.2.2", "2001:db8::1")]
NETWORKS: list[IPNetwork] = [
    *(IPv4Network(one) for one in ("10.0.0.0/24", "10.0.0.0/16", "10.1.0.1/32", "0.0.0.0/0")),
    *(IPv6Network(one) for one in ("fd00::/48", "fd00::1/128")),
]
FAMILIES = [IPV4_UNICAST, IPV6_UNICAST, AfiSafi("l2vpn", "evpn")]
LOCAL = RoutePolicy(EDGE, ALLOW_LOCAL, PolicyDirection.IMPORT, (PolicyStatement(local_routes=True),))
WORDS = some.integers(0, 2**32 - 1)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path that leaves room for sockets."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def matches(network: IPNetwork) -> some.SearchStrategy[PrefixMatch]:
    lengths = some.integers(network.prefixlen, network.max_prefixlen)
    return some.tuples(lengths, lengths).map(lambda both: PrefixMatch(network, min(both), max(both)))


statements = some.builds(
    PolicyStatement,
    neighbors=some.lists(some.sampled_from(ADDRESSES), unique=True, max_size=2).map(tuple),
    prefixes=some.lists(some.sampled_from(NETWORKS).flatmap(matches), max_size=4).map(tuple),
    local_routes=some.booleans(),
    communities=some.lists(WORDS, unique=True, max_size=2).map(tuple),
    large_communities=some.lists(some.tuples(WORDS, WORDS, WORDS), unique=True, max_size=2).map(tuple),
    local_preference=some.none() | some.integers(0, 1000),
)
policies = some.builds(
    RoutePolicy,
    some.just(EDGE),
    some.sampled_from(["a", "b", "c"]),
    some.just(PolicyDirection.EXPORT),
    some.lists(statements, min_size=1, max_size=2).map(tuple),
)
peers = some.builds(
    BGPPeer,
    some.just(EDGE),
    some.sampled_from(["x", "y"]),
    some.sampled_from(ADDRESSES),
    some.sampled_from([65001, 65002, 4200000000]),
    some.just(65001),
    local_address=some.none(),
    remote_port=some.integers(1, 65535),
    password=some.none() | some.just(Secret("sesame")),
    timers=some.builds(PeerTimers, some.integers(1, 300), some.integers(9, 65535), some.integers(1, 3)),
    multihop_ttl=some.integers(1, 255),
    graceful_restart=some.builds(PeerRestart, some.booleans(), some.integers(1, 4095)),
    families=some.lists(some.sampled_from(FAMILIES), unique=True, min_size=1).map(tuple),
)
speakers = some.tuples(
    some.sampled_from([65001, 65001, 65001, 4200000001]),
    some.lists(peers, max_size=3, unique_by=lambda one: one.address),
    some.lists(policies, max_size=3, unique_by=lambda one: one.name),
    some.lists(some.sampled_from(NETWORKS), unique=True),
)


def row(
    asn: int, its: Iterable[BGPPeer] = (), rules: Iterable[RoutePolicy] = (), paths: Iterable[IPNetwork] = ()
) -> WantedSpeaker:
    instance = BGPInstance(EDGE, asn, IPv4Address("192.0.2.9"))
    announced = [AnnouncedPath(EDGE, one) for one in paths]
    return wanted_speakers([instance], its, map(policy_rules, [LOCAL, *rules]), announced)[NAME]


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[SpeakerTarget]:
    """A target; what it has started ends with the block."""
    try:
        yield target(folder, **options)
    finally:
        end_speakers(folder)


def target(folder: Path, **options: object) -> SpeakerTarget:
    return SpeakerTarget(Speakers(SpeakerSettings(**options), folder, structlog.get_logger()))  # type: ignore[arg-type]


async def put(one: SpeakerTarget, wanted: WantedSpeaker) -> None:
    """Make it equal. Raises what it fails with."""
    try:
        await one.put({wanted.name: wanted})
    except BatchError as error:
        raise next(iter(error.failures.values())) from None


async def fails(one: SpeakerTarget, wanted: WantedSpeaker) -> Exception:
    with pytest.raises(BatchError) as caught:
        await one.put({wanted.name: wanted})
    return next(iter(caught.value.failures.values()))


@given(some.lists(some.tuples(speakers, some.none() | some.floats(0, 0.05)), min_size=2, max_size=3))
@settings(max_examples=scaled(25), deadline=None)
def test_a_speaker_has_exactly_what_is_wanted(steps: list[tuple[Any, float | None]]) -> None:
    """Each step by an agent that knows what it wrote; after one that is killed, and last, by another."""

    async def check() -> None:
        with TemporaryDirectory() as folder:
            async with running(Path(folder)) as one:
                for step, killed in steps:
                    wanted = row(*step)
                    with anyio.move_on_after(killed) as scope:
                        await put(one, wanted)
                    if scope.cancelled_caught:
                        one = target(Path(folder))  # noqa: PLW2901  # the next agent
                    else:
                        assert asdict((await one.observe())[NAME]) == asdict(wanted.facts)
                wanted, last = row(*steps[-1][0]), target(Path(folder))
                await put(last, wanted)
                assert asdict((await last.observe())[NAME]) == asdict(wanted.facts)
                await last.drop([NAME])
                assert await last.observe() == {}

    anyio.run(check)


async def test_a_speaker_that_a_killed_agent_did_not_record_is_taken_over(short: Path) -> None:
    async with running(short) as one:
        await put(one, row(65001, []))
        for record in (short / FOLDER).glob("*.json"):
            record.unlink()
        following = target(short)
        assert await following.observe() == {}
        await put(following, row(65001, []))
        assert list(await target(short).observe()) == [NAME]
        assert len(gobgpd_pids(short / FOLDER)) == 1
        await target(short).drop([NAME])
        assert gobgpd_pids(short / FOLDER) == []


async def test_a_peer_that_gobgpd_refuses_leaves_others_alone(short: Path) -> None:
    refused, fine = (BGPPeer(EDGE, "x", one, 65002, 65001, families=(IPV4_UNICAST,)) for one in ADDRESSES[:2])
    refused = msgspec.structs.replace(refused, families=(AfiSafi("opaque", "vpls"),))
    async with running(short) as one:
        wanted = row(65001, [refused, fine])
        assert "AddPeer: " in str(await fails(one, wanted))
        assert (await one.observe())[NAME].peers == {fine.address: wanted.facts.peers[fine.address]}


async def test_a_link_local_peer_with_its_zone_leaves_others_alone(short: Path) -> None:
    """gobgpd has sets of addresses without zones."""
    played = Played(None)
    spec = {"addresses": [{"type": "InternalIP", "ip": "192.0.2.9"}], "ipam": {"podCIDRs": ["10.0.0.0/24"]}}
    played.apply({"kind": "CiliumNode", "metadata": {"name": NODE}, "spec": spec})
    families = [{"afi": "ipv4", "safi": "unicast", "advertisements": {}}]
    played.apply({"kind": "CiliumBGPPeerConfig", "metadata": {"name": "pc"}, "spec": {"families": families}})
    announced = {"advertisements": [{"advertisementType": "PodCIDR"}]}
    played.apply({"kind": "CiliumBGPAdvertisement", "metadata": {"name": "a"}, "spec": announced})
    its = [
        {"name": name, "peerAddress": address, "peerASN": 65002, "peerConfigRef": {"name": "pc"}}
        for name, address in (("zoned", "fe80::1%lo"), ("plain", "192.0.2.1"))
    ]
    instances = [{"name": EDGE, "localASN": 65001, "peers": its}]
    played.apply(
        {"kind": "CiliumBGPNodeConfig", "metadata": {"name": NODE}, "spec": {"bgpInstances": instances}}
    )
    planned = played.plans()[EDGE]
    assert planned.instance is not None
    rules = list(map(policy_rules, planned.policies))
    wanted = wanted_speakers([planned.instance], planned.peers, rules, planned.paths)[NAME]
    assert sorted(map(str, wanted.facts.peers)) == ["192.0.2.1", "fe80::1%lo"]
    async with running(short) as one:
        await put(one, wanted)
        assert asdict((await one.observe())[NAME]) == asdict(wanted.facts)
        without = wanted_speakers([planned.instance], planned.peers[:1], rules[:1], planned.paths)[NAME]
        await put(one, without)
        assert asdict((await one.observe())[NAME]) == asdict(without.facts)


async def test_gobgpd_errors_name_the_cause(short: Path) -> None:
    with pytest.raises(GobgpUnreachableError, match=r"gobgpd at .*/none: connect: Unavailable: No such file"):
        async with connected(short / "none"):
            pass
    async with running(short) as one:
        await put(one, row(65001))
        (place,) = (short / "bgp").glob("*.sock")
        async with connected(place) as gobgp:
            with pytest.raises(
                GobgpError, match=r"gobgpd at .*\.sock: DeletePeer: Unknown: can't delete a peer"
            ):
                await gobgp.delete_peer("192.0.2.1")
            with pytest.raises(GobgpError, match=r"AddPathStream: Unknown: "):
                await gobgp.put_routes([api.ApiPath()] * 5000)
            assert await gobgp.speaker() is not None, "the connection is of use still"
        with socket.create_server(("0.0.0.0", 0)) as taken:
            busy = BGPInstance("busy", 65001, IPv4Address("192.0.2.9"), taken.getsockname()[1])
            error = await fails(one, wanted_speakers([busy], (), (), ())[SpeakerName("busy")])
            assert "StartBgp: Unknown: " in str(error)
            assert "address already in use" in str(error)


async def test_a_program_that_does_not_run_is_named(tmp_path: Path) -> None:
    error = await fails(target(tmp_path, bgp_speaker_path=Path("/bin/false")), row(65001))
    assert isinstance(error, SpeakerError)
    assert str(error).startswith(f"gobgpd for the instance {EDGE} ended when it was started: see ")


async def test_an_external_speaker_serves_one_bgp_instance(short: Path) -> None:
    async with running(short) as own:
        await put(own, row(65001))
        (place,) = (short / "bgp").glob("*.sock")
        (short / "beside" / "bgp").mkdir(parents=True)
        (short / "beside" / "bgp" / "speaker.sock").symlink_to(place)
        beside = target(short / "beside", external_bgp_speaker=True)
        wanted = row(65001, paths=NETWORKS[:2])
        await put(beside, wanted)
        assert (await own.observe())[NAME] == wanted.facts
        second = BGPInstance("other", 1, IPv4Address("192.0.2.9"))
        other = wanted_speakers([second], (), (), ())[SpeakerName("other")]
        assert "there is one speaker, for the instance edge" in str(await fails(beside, other))
        later = target(short / "beside", external_bgp_speaker=True)
        assert (await later.observe()).keys() == {NAME}, "another agent knows what it serves"
        await later.drop([NAME])
        assert await later.observe() == {}
        async with connected(place) as gobgp:
            assert await gobgp.speaker() is None, "it is stopped, and runs on"
