"""Predicts the agent's maps and programs from its settings, before its cells are imported.

The prediction may be wrong: preloaded objects are used only if a cell requests exactly the same. A test
compares the prediction with the requests of the agent's cells.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import structs

from cells.config import AgentSettings
from cells.config.shared import ServiceSettings, service_reach
from cells.datapath.settings import DatapathSettings, ProgramSettings
from cells.maps.specs import ALWAYS, MapSettings, family_of
from lifecycle import Settings, Sources
from lifecycle.settings import RenamedFrom, load

__all__ = ["Forecast", "SettingsOfOthers", "forecast"]


class SettingsOfOthers(Settings, frozen=True):
    """Settings of other cells that determine maps and programs; names and defaults are theirs."""

    bpf_lb_algorithm: Annotated[Literal["random", "maglev"], RenamedFrom("node-port-algorithm")] = "random"
    """See the cell of services."""
    bpf_lb_algorithm_annotation: bool = False
    """See the cell of services."""
    bpf_lb_sock: bool = False
    """See the cell of sockets."""
    cni_chaining_mode: str = "none"
    """See the cell of the CNI configuration."""
    cni_chaining_target: str = ""
    """See the cell of the CNI configuration."""
    enable_host_firewall: bool = False
    """See the cell of policy maps."""
    enable_ip_masq_agent: bool = False
    """See the cell of masquerading."""
    enable_ipsec: bool = False
    """See the cell of IPsec."""
    enable_ipv4_egress_gateway: bool = False
    """See the cell of tunnels."""
    enable_ipv4_masquerade: bool | None = None
    """See the cell of masquerading."""
    enable_ipv6_masquerade: bool | None = None
    """See the cell of masquerading."""
    enable_l2_announcements: bool = False
    """See the cell of announcements."""
    enable_local_redirect_policy: bool = False
    """See the cell of services."""
    enable_session_affinity: bool = False
    """See the cell of services."""
    enable_wireguard: bool = False
    """See the cell of WireGuard."""
    policy_cidr_match_mode: tuple[str, ...] = ()
    """See the cell of nodes."""
    routing_mode: Literal["native", "tunnel"] = "tunnel"
    """See the cell of tunnels."""


class Forecast(msgspec.Struct, frozen=True):
    """The predicted maps and programs."""

    agent: AgentSettings
    maps: MapSettings
    used: frozenset[str]
    """Attributes of Maps that cells use."""
    programs: ProgramSettings


def forecast(sources: Sources) -> Forecast | None:
    """Predict by these settings; None if some are invalid, which the start reports."""
    kinds = (AgentSettings, MapSettings, DatapathSettings, ServiceSettings, SettingsOfOthers)
    filled = load(kinds, sources, part=True).structs
    if len(filled) < len(kinds):
        return None
    agent, maps, datapath, services, others = (filled[kind] for kind in kinds)
    assert isinstance(agent, AgentSettings)  # noqa: S101  (for the type checker, as are those below)
    assert isinstance(maps, MapSettings)  # noqa: S101
    assert isinstance(datapath, DatapathSettings)  # noqa: S101
    assert isinstance(services, ServiceSettings)  # noqa: S101
    assert isinstance(others, SettingsOfOthers)  # noqa: S101
    reach = service_reach(services)
    past_stack = (
        reach.replaces_kube_proxy and not others.enable_ipsec and not datapath.enable_host_legacy_routing
    )
    programs = ProgramSettings(
        **structs.asdict(datapath) | {"enable_host_legacy_routing": not past_stack},
        marks_for_xfrm=others.enable_ipsec,
        serves_outside=reach.outside,
    )
    return Forecast(agent, maps, _used(agent, datapath, services, others), programs)


def _used(
    agent: AgentSettings, datapath: DatapathSettings, services: ServiceSettings, others: SettingsOfOthers
) -> frozenset[str]:
    reach = service_reach(services)
    own_links = others.cni_chaining_mode.lower() in {"", "none", "portmap"} and not (
        others.cni_chaining_target and others.cni_chaining_mode.lower() != "portmap"
    )
    maglev = others.bpf_lb_algorithm == "maglev" or others.bpf_lb_algorithm_annotation
    wanted = {
        ("affinity4", "affinity6", "affinity_match"): reach.replaces_kube_proxy
        or others.enable_session_affinity,
        ("egress_gateway4",): others.enable_ipv4_egress_gateway,
        ("encryption_paths",): others.enable_wireguard,
        ("ipmasq4", "ipmasq6"): others.enable_ip_masq_agent,
        ("l2_responder4",): others.enable_l2_announcements,
        ("maglev4", "maglev6"): reach.outside and maglev,
        ("nodeport_neighbours4", "nodeport_neighbours6"): reach.outside and datapath.accelerates,
        ("pod_networks",): others.enable_ipsec,
        ("policy_prefixes",): "pods" in others.policy_cidr_match_mode,
        ("reverse_sk4", "reverse_sk6"): others.bpf_lb_sock or reach.replaces_kube_proxy,
        ("services4", "services6", "backends4", "backends6", "reverse_nat4", "reverse_nat6"): True,
        ("skip_lb4", "skip_lb6"): others.enable_local_redirect_policy,
        ("snat4",): _asked(others.enable_ipv4_masquerade, default=own_links) or reach.outside,
        ("snat6",): _asked(others.enable_ipv6_masquerade, default=own_links) or reach.outside,
        ("source_range4", "source_range6"): True,
        ("tunnels",): others.routing_mode == "tunnel",
    }
    families = {0} | ({4} if agent.enable_ipv4 else set()) | ({6} if agent.enable_ipv6 else set())
    names = ALWAYS.union(*(maps for maps, used in wanted.items() if used))
    used = {name for name in names if family_of(name) in families}
    if others.enable_host_firewall:  # the node has both families
        used |= {name for name in ALWAYS if name.startswith(("ct", "fragments"))}
    return frozenset(used)


def _asked(setting: bool | None, *, default: bool) -> bool:
    return default if setting is None else setting
