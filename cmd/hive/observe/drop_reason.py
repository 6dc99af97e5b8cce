"""``hive drop-reason``: the meaning of drop reasons, and what to do about them.

The same text is in docs/operate/drop-reasons.md, which an installed agent does not have.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import click

from cells.observe.events import DROP_REASONS
from hive.output import fact_lines, terminal_width


class Advice(NamedTuple):
    """The meaning of a reason, and what to do."""

    means: str
    do: str


ADVICE: Final = {
    132: Advice(
        "a pod sends from an address that is not its own, or a device receives from an address of this node",
        "if the pod routes for others, set SourceIPVerification=Disabled for its endpoint",
    ),
    133: Advice(
        "no policy rule allows the packet",
        "hive policy explain SOURCE DESTINATION; hive bpf policy POD",
    ),
    134: Advice(
        "the packet is shorter than its headers state, or has a malformed address",
        "check the sender",
    ),
    135: Advice(
        "the transport header is truncated or inconsistent",
        "check the sender, and the offloads of the device",
    ),
    137: Advice(
        "none of TCP, UDP, ICMP and ICMPv6, where flows are tracked; SCTP without enable-sctp",
        "set enable-sctp for SCTP; others are not supported",
    ),
    139: Advice(
        (
            "neither IP nor ARP, from a pod or at a node with a host policy; or a family in which the pod "
            "has no address"
        ),
        "set enable-ipv4 or enable-ipv6 if it is off",
    ),
    140: Advice(
        "a datapath program is missing until it is repaired",
        "hive status; restart the agent after 30 s",
    ),
    141: Advice(
        "the kernel had no memory to change the packet",
        "check the node's memory",
    ),
    147: Advice(
        "a packet at the tunnel device has no tunnel metadata",
        "find the program that uses the tunnel device",
    ),
    150: Advice(
        "neighbour discovery for an address that no pod has",
        "harmless: the client has a stale address",
    ),
    151: Advice(
        "no pod, node or route has the address, or no longer",
        "hive ip get ADDRESS; look for outdated DNS records or endpoints",
    ),
    154: Advice(
        "the kernel could not change the packet, or an SCTP service has backends on another port",
        "for SCTP set targetPort to the service's port; else check the node's memory",
    ),
    155: Advice(
        "a conntrack map is full",
        "see cilium_bpf_map_pressure; raise bpf-ct-global-tcp-max or bpf-ct-global-any-max",
    ),
    156: Advice(
        "too many headers, a truncated one, or one that hides the transport header",
        "usually a scan",
    ),
    158: Advice(
        (
            "a service without endpoints, with service-no-backend-response=drop or a client that cannot "
            "be answered"
        ),
        "hive service get NAME; check that its pods are ready",
    ),
    165: Advice(
        "a link without an endpoint, or a node without its configuration in the maps",
        "hive endpoint list; look for left-over links",
    ),
    166: Advice(
        "no Ethernet header where one is needed",
        "check the kind of the device",
    ),
    167: Advice(
        "no port is free for this address and destination, or a reply matches no connection",
        "hive bpf dump snat_v4_external; raise bpf-nat-global-max",
    ),
    168: Advice(
        "to be masqueraded, and an ICMP message without an identifier, or an error about an unknown protocol",
        "exclude the destination (ip-masq-agent)",
    ),
    169: Advice(
        "the node has no route to the address, or one that prohibits it",
        "ip route get ADDRESS on the node",
    ),
    170: Advice(
        "a pod sends to the tunnel's port",
        "not allowed: it could forge packets of the tunnel",
    ),
    171: Advice(
        "a packet from the tunnel has an identity that other nodes may not use",
        "compare version and settings of both nodes",
    ),
    172: Advice(
        "a packet from the tunnel comes from an address that belongs to no node",
        "hive node list: a node that is not known yet, or an attack",
    ),
    174: Advice(
        "a client outside connects to a cluster address",
        "set bpf-lb-external-clusterip to allow it",
    ),
    175: Advice(
        "the first fragment was lost, denied, or evicted from the map of fragments",
        "check the MTU; raise bpf-fragments-map-max",
    ),
    177: Advice(
        "the client is outside loadBalancerSourceRanges",
        "check the service's spec",
    ),
    178: Advice(
        "the DNS proxy or Envoy does not listen",
        "hive status; check Envoy's pod",
    ),
    181: Advice(
        "a deny rule selects the packet",
        "hive policy explain SOURCE DESTINATION",
    ),
    182: Advice(
        "a VLAN-tagged frame at a device",
        "add the VLAN's device to devices",
    ),
    189: Advice(
        "a rule requires mutual authentication, which is not implemented",
        "remove authentication from the rule",
    ),
    194: Advice(
        "a CiliumEgressGatewayPolicy selects the packet, but no node",
        "hive db show egress-gateways on the pod's node",
    ),
    195: Advice(
        (
            "strict mode: the packet would leave unencrypted between addresses of "
            "encryption-strict-mode-cidr. IPsec: a pod of another node has the address or may have it, "
            "and its key is not known"
        ),
        (
            "check that the other node is known and has a key: cilium-dbg encrypt status, hive db show "
            "pod-networks"
        ),
    ),
    196: Advice(
        "the hop limit is used up; an IPv4 packet for a pod, or one too short for an ICMP error",
        "look for a routing loop; traceroute causes it too",
    ),
    197: Advice(
        "IPsec would encrypt the packet, and the other node has no node ID here",
        "hive db show node-ids",
    ),
    203: Advice(
        "the pod is being created, restored or removed",
        "lasts milliseconds; otherwise hive endpoint get POD",
    ),
    204: Advice(
        "this node is an egress gateway, and has no address to send from",
        "hive db show egress-gateways on the gateway",
    ),
}
"""Cilium's number -> advice, for the reasons of this datapath."""


def reason_text(number: int) -> str:
    """Return text and meaning of a reason in one line; for an unknown one number and text only."""
    name = f"{DROP_REASONS.get(number, 'unknown reason')} ({number})"
    advice = ADVICE.get(number)
    return name if advice is None else f"{name}: {advice.means}. What to do: {advice.do}"


@click.command()
@click.argument("reason", required=False)
def command(reason: str | None) -> None:
    """Show the meaning of drop reasons, and what to do.

    REASON is a number, or words of the text that `hive monitor` and `hive observe` show; without it, all.
    """
    for position, number in enumerate(_found(reason) if reason else ADVICE):
        if position:
            click.echo()
        click.echo(f"{number} {DROP_REASONS[number]}")
        facts = [("  means", ADVICE[number].means), ("  do", ADVICE[number].do)]
        for line in fact_lines(facts, terminal_width()):
            click.echo(line)


def _found(reason: str) -> Iterator[int]:
    """Return the matching reasons. Raises click.UsageError if there are none."""
    numbers = [
        number
        for number, text in DROP_REASONS.items()
        if (reason == str(number) if reason.isdigit() else reason.lower() in text.lower())
    ]
    if not numbers:
        raise click.UsageError(
            f"there is no drop reason {reason}: expected a number or words of its text, as hive drop-reason"
            " shows all"
        )
    if not any(number in ADVICE for number in numbers):
        raise click.UsageError(
            f"{numbers[0]} {DROP_REASONS[numbers[0]]}: it belongs to what is not built, and never occurs"
        )
    return (number for number in numbers if number in ADVICE)
