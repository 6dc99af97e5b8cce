"""Whether a saved endpoint still stands: its link is there and is its own.

For:   RestoredEndpoints.   Needs: values.   Gives: alias_owner, fault_of, abandoned.
Source: Cilium 1.17, validation of old endpoints and clearCiliumVeths.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from cells.endpoint import Endpoint
from cells.node.netlink import LinkInfo

_ALIAS: Final = re.compile(r"hive endpoint ([0-9]+)")
_POD_LINK: Final = re.compile(r"lxc[0-9a-f]{12}")


def alias_owner(alias: str) -> int | None:
    """The endpoint id in a link's alias; None when it is not one of ours."""
    found = _ALIAS.fullmatch(alias)
    return int(found[1]) if found else None


def fault_of(endpoint: Endpoint, links: Mapping[str, LinkInfo]) -> str | None:
    """Why the endpoint cannot go on living, None if it can.

    A link without alias that is up was made by Cilium's own plugin; one that is down was never finished:
    its requester got no answer. That does not apply to a link of another plugin.
    """
    link = links.get(endpoint.ifname)
    if link is None:
        return f"interface {endpoint.ifname} could not be found"
    if link.ifindex != endpoint.ifindex:
        return (
            f"interface {endpoint.ifname} is another one: its index is {link.ifindex}, not {endpoint.ifindex}"
        )
    owner = alias_owner(link.alias)
    if owner is not None and owner != endpoint.id:
        return f"interface {endpoint.ifname} is endpoint {owner}'s, by its alias"
    if not link.alias and not link.up and not endpoint.datapath.on_anothers_link:
        return f"interface {endpoint.ifname} was never brought up: adding the pod was interrupted"
    return None


def abandoned(links: Iterable[LinkInfo], live: Collection[int], unsure: Collection[int]) -> list[LinkInfo]:
    """The links of pods that no endpoint has.

    ``live``: link indexes of the restored endpoints; ``unsure``: ids whose state could not be read.
    A link that is up without alias may be Cilium's own plugin's, and is never abandoned, except half of a
    pair whose other end has not left this namespace.
    """
    everything = {link.ifindex: link for link in links}
    return [
        link
        for link in everything.values()
        if link.kind == "veth"
        and link.ifindex not in live
        and (_is_unowned(link, unsure) or _is_half_made_pair(link, everything, live))
    ]


def _is_unowned(link: LinkInfo, unsure: Collection[int]) -> bool:
    if not _POD_LINK.fullmatch(link.name):
        return False
    owner = alias_owner(link.alias)
    if owner is None:
        return not link.alias and not link.up
    return owner not in unsure


def _is_half_made_pair(link: LinkInfo, links: Mapping[int, LinkInfo], live: Collection[int]) -> bool:
    peer = None if link.link_netnsid is not None else links.get(link.peer_ifindex)
    return (
        peer is not None
        and peer.peer_ifindex == link.ifindex
        and peer.link_netnsid is None
        and peer.ifindex not in live
        and bool(_POD_LINK.fullmatch(peer.name) or _POD_LINK.fullmatch(link.name))
    )
