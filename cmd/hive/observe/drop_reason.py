"""``hive drop-reason``: what the reasons of dropped packets mean, and what to do about them.

The same is in docs/operate/drop-reasons.md, which an installed agent does not have.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import click

from cells.observe.events import DROP_REASONS
from hive.output import fact_lines, terminal_width


class Advice(NamedTuple):
    """What a reason means, and what to do."""

    means: str
    do: str


ADVICE: Final = {
    132: Advice(
        ("a pod sends from an address that is not its own, or a device brings an address of this node"),
        ("look for a pod that routes for others; SourceIPVerification=Disabled lets one endpoint do it"),
    ),
    133: Advice(
        "no rule allows it",
        "hive policy explain SOURCE DESTINATION; hive bpf policy POD",
    ),
    134: Advice(
        "shorter than its own headers state, or a malformed address",
        "usually a fault of the sender",
    ),
    135: Advice(
        "the transport header is cut or contradicts itself",
        "as above; check offloads of the device",
    ),
    137: Advice(
        ("neither TCP, UDP, ICMP nor ICMPv6, where a flow must be tracked; SCTP without enable-sctp"),
        "enable-sctp, or not supported",
    ),
    139: Advice(
        (
            "neither IP nor ARP from a pod, or at a node with a policy; or a family of which the pod "
            "has no address (enable-ipv4, enable-ipv6)"
        ),
        "switch it on, or leave it",
    ),
    140: Advice(
        "a program of the datapath is missing, for the moment of a repair",
        "hive status; it comes back within 30 s, else restart the agent",
    ),
    141: Advice(
        "the kernel gave no memory for the packet",
        "memory of the node",
    ),
    147: Advice(
        "a packet at the tunnel's device without metadata",
        "another program uses the tunnel's device",
    ),
    150: Advice(
        "neighbour discovery for an address that no pod has",
        "harmless; stale addresses in the client",
    ),
    151: Advice(
        "no pod, node or route has the address, or none any more",
        "hive ip get ADDRESS; DNS or endpoints that are out of date",
    ),
    154: Advice(
        ("the kernel could not change the packet, or SCTP goes to a service with backends on another port"),
        "targetPort of the service; memory of the node",
    ),
    155: Advice(
        "a conntrack map is full",
        "cilium_bpf_map_pressure; larger bpf-ct-global-tcp-max, bpf-ct-global-any-max",
    ),
    156: Advice(
        "too many, cut, or of a kind that hides the transport header",
        "usually a scan",
    ),
    158: Advice(
        ("a service without endpoints, with service-no-backend-response=drop, or which cannot be answered"),
        "hive service get NAME; readiness of its pods",
    ),
    165: Advice(
        "a link without an endpoint, or a node without its facts",
        "hive endpoint list; left-over links",
    ),
    166: Advice(
        "no Ethernet header where one is needed",
        "kind of the device",
    ),
    167: Advice(
        "no free port for the address and destination, or an answer that no one waits for",
        "hive bpf dump snat_v4_external; bpf-nat-global-max",
    ),
    168: Advice(
        "leaves masqueraded, and is none of TCP, UDP, ICMP, SCTP",
        "exclude it (ip-masq-agent)",
    ),
    169: Advice(
        "the node has no route, or a forbidden one",
        "ip route get ADDRESS on the node",
    ),
    170: Advice(
        "a pod sends to the tunnel's port itself",
        "not allowed",
    ),
    171: Advice(
        "a packet out of the tunnel claims an identity that no other node may give",
        "versions and settings of the other node",
    ),
    172: Advice(
        "a packet out of the tunnel from an address of no node",
        "a node that is not known yet (hive node list), or an attacker",
    ),
    174: Advice(
        "a client outside asks for a cluster address",
        "bpf-lb-external-clusterip",
    ),
    175: Advice(
        "the first fragment was lost, denied, or displaced from the map of fragments",
        "MTU; bpf-fragments-map-max",
    ),
    177: Advice(
        "outside loadBalancerSourceRanges",
        "the service's spec",
    ),
    178: Advice(
        "the DNS proxy or Envoy that should take it does not listen",
        "hive status, Envoy's pod",
    ),
    181: Advice(
        "a deny rule selects it",
        "hive policy explain SOURCE DESTINATION",
    ),
    182: Advice(
        "a tagged frame at a device that serves no VLANs",
        "make the VLAN's device one of devices",
    ),
    189: Advice(
        "a rule asks for mutual authentication, which is not built",
        "remove authentication from the rule",
    ),
    194: Advice(
        "a CiliumEgressGatewayPolicy has the packet, and selects no node",
        "hive db show egress-gateways on the pod's node",
    ),
    195: Advice(
        (
            "strict mode: the packet would leave in clear text between addresses of "
            "encryption-strict-mode-cidr. IPsec: it is for an address that a pod of another node has "
            "or may have, and no key is known for it"
        ),
        (
            "the other node has no key or is not known yet: cilium-dbg encrypt status, hive db show "
            "pod-networks"
        ),
    ),
    196: Advice(
        "the hop limit is used up; the sender gets the ICMP error",
        "a loop of routes, or traceroute",
    ),
    197: Advice(
        "IPsec would encrypt the packet, and the other node has no number here",
        "hive db show node-ids",
    ),
    203: Advice(
        "the pod is being created, restored or removed",
        "lasts milliseconds; otherwise hive endpoint get POD",
    ),
    204: Advice(
        "this node is an egress gateway, and has no address to be one",
        "hive db show egress-gateways on the gateway",
    ),
}
"""By Cilium's numbers, of the reasons that the datapath gives."""


def reason_text(number: int) -> str:
    """What to know of a reason, in a line; its number and text alone for one that is not ours."""
    name = f"{DROP_REASONS.get(number, 'unknown reason')} ({number})"
    advice = ADVICE.get(number)
    return name if advice is None else f"{name}: {advice.means}. What to do: {advice.do}"


@click.command()
@click.argument("reason", required=False)
def command(reason: str | None) -> None:
    """Show what drop reasons mean, and what to do.

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
    """Raises click.UsageError for one that there is not."""
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
