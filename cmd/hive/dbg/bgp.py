"""``cilium-dbg bgp``: peers, routes and route policies of the BGP control plane.

Source: Cilium 1.17, cilium-dbg/cmd/bgp*.go, pkg/bgpv1/api; the texts of attributes are those of
        github.com/osrg/gobgp/v3/pkg/packet/bgp; RFC 4271, 1997, 4760, 8092.
"""

import base64
import json
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

import click

from hive.dbg.go_text import Shape, address_fault, aligned, go_duration, model, output_option, printed
from hive.dbg.main import Group
from hive.dbg.requests import RequestFailedError, ask

_DISABLED: Final = 501
_FAMILIES: Final = {"ipv4": 1, "ipv6": 2, "l2vpn": 25}
_SUBFAMILIES: Final = {
    "unicast": 1,
    "multicast": 2,
    "mpls_label": 4,
    "encapsulation": 7,
    "vpls": 65,
    "evpn": 70,
}
_TABLES: Final = {"available": "loc-rib", "advertised": "adj-rib-out"}
_DEFAULTS: Final = ("available", "ipv4", "unicast")
_ORIGINS: Final = {0: "i", 1: "e", 2: "?"}
_COMMUNITIES: Final = {
    0x00000000: "internet",
    0xFFFF0000: "planned-shut",
    0xFFFF0001: "accept-own",
    0xFFFF0002: "route-filter-translated-v4",
    0xFFFF0003: "route-filter-v4",
    0xFFFF0004: "route-filter-translated-v6",
    0xFFFF0005: "route-filter-v6",
    0xFFFF0006: "llgr-stale",
    0xFFFF0007: "no-llgr",
    0xFFFF029A: "blackhole",
    0xFFFFFF01: "no-export",
    0xFFFFFF02: "no-advertise",
    0xFFFFFF03: "no-export-subconfed",
    0xFFFFFF04: "no-peer",
}
_EXTENDED_LENGTH: Final = 0x10
_SIZES: Final = {1: 1, 4: 4, 5: 4}
"""Type of a path attribute -> size of its value in bytes: ORIGIN, MULTI_EXIT_DISC, LOCAL_PREF."""
_PEERS: Final[Shape] = {"families[]": {}}
_ROUTES: Final[Shape] = {"paths[]": {"path-attributes[]": {}}}
_POLICIES: Final[Shape] = {
    "statements[]": {
        "add-communities[]": {},
        "add-large-communities[]": {},
        "match-neighbors[]": {},
        "match-prefixes[]": {},
    }
}


@click.group(cls=Group, aliases={"neighbors": "peers", "rps": "route-policies"})
def command() -> None:
    """Access to BGP control plane"""


def _asked(operation: str, failure: str, query: dict[str, str] | None = None) -> Any:
    """Return the agent's answer, or print a line and return None without BGP. Raises click.ClickException."""
    try:
        return ask(operation, query=query)
    except RequestFailedError as error:
        if error.status == _DISABLED:
            click.echo("BGP Control Plane is disabled")
            return None
        raise click.ClickException(f"{failure}: {error}\n") from error


def _print(models: list[Any], form: str, kind: str) -> None:
    """Print in the form of ``-o``. Raises click.ClickException."""
    try:
        text = printed(models, form, f"[cells.api.models.node:{kind}]")
    except click.ClickException as error:
        raise click.ClickException(f"error getting output in JSON: {error.message}\n") from error
    click.echo(text)


def uptime(nanoseconds: int) -> str:
    """Round to seconds, halves up, as Go does."""
    return go_duration((nanoseconds + 500_000_000) // 10**9 * 10**9)


@command.command()
@click.argument("ignored", nargs=-1)
@output_option
def peers(ignored: tuple[str, ...], output: str) -> None:
    """List current state of all peers"""
    del ignored
    found = _asked("GET /bgp/peers", "cannot get peers list")
    if found is None:
        return
    if output:
        _print([model(one, _PEERS) for one in found], output, "BgpPeer")
        return
    lines = ["Local AS\tPeer AS\tPeer Address\tSession\tUptime\tFamily\tReceived\tAdvertised\n"]
    for one in sorted(found, key=_peer_order):
        address = f"{one.get('peer-address', '')}:{one.get('peer-port', 0)}"
        cells = (one.get("local-asn", 0), one.get("peer-asn", 0), address, one.get("session-state", ""))
        lines.append("".join(f"{cell}\t" for cell in (*cells, uptime(one.get("uptime-nanoseconds", 0)))))
        for number, family in enumerate(one.get("families") or ()):
            before = "\t\t\t\t\t" if number else ""
            name = f"{family.get('afi', '')}/{family.get('safi', '')}"
            lines.append(f"{before}{name}\t{family.get('received', 0)}\t{family.get('advertised', 0)}\t\n")
    click.echo(aligned("".join(lines)), nl=False)


def _peer_order(one: dict[str, Any]) -> tuple[str, int]:
    return one.get("peer-address", ""), one.get("local-asn", 0)


@command.command()
@click.argument(
    "words", nargs=-1, metavar="<available | advertised> <afi> <safi> [vrouter <asn>] [peer <address>]"
)
@output_option
def routes(words: tuple[str, ...], output: str) -> None:
    """List routes in the BGP Control Plane's RIBs"""
    query = _route_query(words)
    if len(words) < len(_DEFAULTS) and not output:
        missing = " ".join(_DEFAULTS[len(words) :])
        what = {0: "routes", 1: "routes", 2: "SAFI"}[len(words)]
        click.echo(f"(Defaulting to `{missing}` {what}, please see help for more options)\n")
    found = _asked("GET /bgp/routes", "failed retrieving routes", query)
    if found is None:
        return
    if output:
        _print([model(one, _ROUTES) for one in found], output, "BgpRoute")
        return
    advertised = query["table_type"] == "adj-rib-out"
    peer = advertised and "neighbor" not in query
    rows = [row for one in found for row in route_rows(one)]
    rows.sort(key=lambda row: (row[0], _prefix_order(row[2]), _address_order(row[1])))
    columns = [0, 1, 2, 3, 4, 5] if peer else [0, 2, 3, 4, 5]
    header = ("VRouter", "Peer", "Prefix", "NextHop", "Age", "Attrs")
    lines = ["\t".join(header[column] for column in columns)]
    lines.extend("\t".join(str(row[column]) for column in columns) + "\t" for row in rows)
    click.echo(aligned("\n".join(lines)))


def _route_query(words: tuple[str, ...]) -> dict[str, str]:
    """Return the query of the routes command. Raises click.ClickException."""
    left = list(words)
    table = left.pop(0) if left else "available"
    if table not in _TABLES:
        raise click.ClickException(
            f"invalid argument: invalid table type discriminator `{table}` "
            "(should be `available` / `advertised`)\n"
        )
    family = left.pop(0) if left else "ipv4"
    subfamily = left.pop(0) if left else "unicast"
    for what, word, known in (("AFI", family, _FAMILIES), ("SAFI", subfamily, _SUBFAMILIES)):
        if word not in known:
            raise click.ClickException(f"invalid argument: unknown {what} {word}\n")
    query = {"table_type": _TABLES[table], "afi": family, "safi": subfamily}
    if left[:1] == ["vrouter"]:
        query["router_asn"] = _router(left)
        left = left[2:]
    if left[:1] in (["peer"], ["neighbor"]):
        query["neighbor"] = _peer(left)
    return query


def _router(words: list[str]) -> str:
    failure = "failed to parse vrouter ASN"
    if len(words) < 2:
        raise click.ClickException(f"{failure}: missing vrouter ASN value\n")
    if not words[1].isdigit():
        reason = f'strconv.ParseInt: parsing "{words[1]}": invalid syntax'
        raise click.ClickException(f"{failure}: invalid vrouter ASN: {reason}\n")
    return words[1]


def _peer(words: list[str]) -> str:
    failure = "failed to parse peer address"
    if len(words) < 2:
        raise click.ClickException(f"{failure}: missing peer IP address\n")
    try:
        return str(ip_address(words[1]))
    except ValueError as error:
        reason = f"ParseAddr({json.dumps(words[1])}): {address_fault(words[1]) or error}"
        raise click.ClickException(f"{failure}: invalid peer IP address: {reason}\n") from error


def route_rows(route: dict[str, Any]) -> Iterator[tuple[int, str, str, str, str, str]]:
    """Return router, neighbor, prefix, next hop, age and attributes of each path.

    Raises click.ClickException.
    """
    for path in route.get("paths") or ():
        family = path.get("family") or {}
        afi, safi = _FAMILIES.get(family.get("afi", ""), 0), _SUBFAMILIES.get(family.get("safi", ""), 0)
        failure = "failed to decode API route: failed to deserialize Paths"
        if not (afi and safi):
            raise click.ClickException(
                f"{failure}: failed to create native NLRI struct from AFI/SAFI: "
                f"unknown route family. AFI: {afi}, SAFI: {safi}\n"
            )
        data = _decoded((path.get("nlri") or {}).get("base64"), failure, "NLRI")
        try:
            prefix = _prefix(data, afi)[0]
        except IndexError:
            raise click.ClickException(
                f"{failure}: failed to decode NLRI: prefix misses length field\n"
            ) from None
        except ValueError as error:
            raise click.ClickException(f"{failure}: failed to decode NLRI: {error}\n") from error
        attributes = []
        hop = "0.0.0.0"
        for one in path.get("path-attributes") or ():
            data = _decoded(one.get("base64"), failure, "Path Attribute")
            if len(data) < 3:
                reason = "failed to retrieve serialized Path Attribute: attribute type length is short"
                raise click.ClickException(f"{failure}: {reason}\n")
            try:
                text, next_hop = _attribute(data)
            except (IndexError, ValueError, struct.error) as error:
                reason = (
                    f"failed to decode serialized Path Attribute: type {data[1]}, malformed: {data.hex()}"
                )
                raise click.ClickException(f"{failure}: {reason}\n") from error
            hop = next_hop or hop
            attributes.append(text)
        age, router = uptime(path.get("age-nanoseconds", 0)), route.get("router-asn", 0)
        yield (
            router,
            route.get("neighbor", ""),
            prefix,
            hop,
            age,
            f"[{' '.join(attributes)}]",
        )


def _decoded(text: str | None, failure: str, what: str) -> bytes:
    try:
        return base64.b64decode(text or "", validate=True)
    except ValueError as error:
        reason = f"failed to decode base64-encoded {what}: {error}: {text}"
        raise click.ClickException(f"{failure}: {reason}\n") from error


def _prefix(data: bytes, afi: int) -> tuple[str, int]:
    """Parse a prefix of a route; return it with its size. Raises IndexError for no bytes, ValueError."""
    bits = data[0]
    size = (bits + 7) // 8
    width, kind = (4, IPv4Address) if afi == 1 else (16, IPv6Address)
    if size > min(width, len(data) - 1):
        raise ValueError(f"a prefix of {bits} bits in {len(data) - 1} bytes, for addresses of {width} bytes")
    return f"{kind(data[1 : 1 + size].ljust(width, bytes(1)))}/{bits}", 1 + size


def _attribute(data: bytes) -> tuple[str, str]:
    """Return a path attribute in GoBGP's words, and its next hop.

    Raises IndexError, ValueError or struct.error for a value of an invalid size.
    """
    flags, kind = data[0], data[1]
    start = 4 if flags & _EXTENDED_LENGTH else 3
    value = data[start : start + int.from_bytes(data[2:start], "big")]
    if start + int.from_bytes(data[2:start], "big") > len(data) or len(value) != _SIZES.get(kind, len(value)):
        raise ValueError(data)
    hop = ""
    match kind:
        case 1:
            text = f"{{Origin: {_ORIGINS.get(value[0], '-')}}}"
        case 2:
            text = f"{{AsPath: {' '.join(_segments(value))}}}"
        case 3:
            hop = str(ip_address(value))
            text = f"{{Nexthop: {hop}}}"
        case 4 | 5:
            text = f"{{{'Med' if kind == 4 else 'LocalPref'}: {int.from_bytes(value, 'big')}}}"
        case 8:
            text = (
                f"{{Communities: {', '.join(_community(one) for (one,) in struct.iter_unpack('>I', value))}}}"
            )
        case 14:
            hop, text = _reachable(value)
        case 32:
            large = (":".join(map(str, one)) for one in struct.iter_unpack(">III", value))
            text = f"{{LargeCommunity: [ {', '.join(large)}]}}"
        case _:
            text = f"{{Flags: {flags:#x}, Type: {kind}, Value: [{' '.join(map(str, value))}]}}"
    return text, hop


def _segments(value: bytes) -> Iterator[str]:
    place = 0
    while place < len(value):
        kind, count = value[place], value[place + 1]
        size = 4 * count
        if place + 2 + size > len(value):
            raise ValueError(value)
        numbers = [str(one) for (one,) in struct.iter_unpack(">I", value[place + 2 : place + 2 + size])]
        yield {1: "{%s}", 3: "(%s)", 4: "[%s]"}.get(kind, "%s") % ("," if kind in {1, 4} else " ").join(
            numbers
        )
        place += 2 + size


def _community(number: int) -> str:
    return _COMMUNITIES.get(number) or f"{number >> 16}:{number & 0xFFFF}"


def _reachable(value: bytes) -> tuple[str, str]:
    """Return next hop and text of MP_REACH_NLRI."""
    afi, _, size = struct.unpack_from(">HBB", value)
    address = ip_address(value[4 : 4 + min(size, 16)])
    hop = str(getattr(address, "ipv4_mapped", None) or address)
    rest = value[5 + size :]
    prefixes = []
    while rest:
        prefix, length = _prefix(rest, afi)
        prefixes.append(prefix)
        rest = rest[length:]
    name = {1: "ipv4-unicast", 2: "ipv6-unicast"}.get(afi, str(afi))
    return hop, f"{{MpReach({name}): {{Nexthop: {hop}, NLRIs: [{' '.join(prefixes)}]}}}}"


def _address_order(text: str) -> tuple[int, bytes]:
    try:
        address = ip_address(text)
    except ValueError:
        return 0, text.encode()
    return address.version, address.packed


def _prefix_order(text: str) -> tuple[int, bytes, int]:
    address, _, bits = text.partition("/")
    return *_address_order(address), int(bits or 0)


@command.command("route-policies")
@click.argument("words", nargs=-1, metavar="[vrouter <asn>]")
@output_option
def route_policies(words: tuple[str, ...], output: str) -> None:
    """List route policies configured in the underlying routing daemon"""
    query = {"router_asn": _router(list(words))} if words[:1] == ("vrouter",) else {}
    found = _asked("GET /bgp/route-policies", "cannot get route policies list", query)
    if found is None:
        return
    if output:
        _print([model(one, _POLICIES) for one in found], output, "BgpRoutePolicy")
        return
    lines = [
        "VRouter\tPolicy Name\tType\tMatch Peers\tMatch Prefixes (Min..Max Len)\tRIB Action\tPath Actions\n"
    ]
    for one in found:
        before = f"{one.get('router-asn', 0)}\t{one.get('name', '')}\t{one.get('type', '')}\t"
        statements = one.get("statements") or ()
        for statement in statements:
            prefixes = [
                f"{each.get('cidr', '')} ({each.get('prefix-len-min', 0)}..{each.get('prefix-len-max', 0)})"
                for each in statement.get("match-prefixes") or ()
            ]
            lines.append(
                f"{before}{_several(statement.get('match-neighbors') or ())}\t{_several(prefixes)}\t"
                f"{statement.get('route-action', '')}\t{_several(policy_actions(statement))}\t\n"
            )
            before = "\t\t\t"
        if not statements:
            lines.append(before + "\n")
    click.echo(aligned("".join(lines)), nl=False)


def _several(texts: Iterable[str]) -> str:
    """Join values: one is unchanged, several are in braces."""
    found = list(texts)
    return found[0] if len(found) == 1 else " ".join(f"{{{text}}}" for text in found)


def policy_actions(statement: dict[str, Any]) -> Iterator[str]:
    """Return the actions of a statement."""
    if (preference := statement.get("set-local-preference")) is not None and preference >= 0:
        yield f"SetLocalPreference: {preference}"
    for key, name in (
        ("add-communities", "AddCommunities"),
        ("add-large-communities", "AddLargeCommunities"),
    ):
        if values := statement.get(key):
            yield f"{name}: [{' '.join(values)}]"
