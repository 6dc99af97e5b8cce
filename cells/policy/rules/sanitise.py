"""Checks of rules beyond the schema: forbidden combinations, and fields that must parse.

Messages are Cilium's, so that status conditions are equal. Rules that Cilium supports and this agent does not
raise UnsupportedError. Deny rules may combine peers, as in Cilium: they deny all of them.

Source: Cilium's pkg/policy/api/rule_validation.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from ipaddress import ip_network

from cells.base.regexp import RegexpError, compile_regexp
from cells.policy.labels import contains
from cells.policy.rules import (
    PolicyError,
    PolicyOptions,
    UnsupportedError,
    at,
    icmp_type,
    is_service_name,
    label_name_error,
    port_number,
)
from cells.policy.rules.schema import (
    CIDRRule,
    EgressRule,
    EndpointSelector,
    HTTPRule,
    IngressRule,
    KafkaRule,
    L7Rules,
    PortProtocol,
    PortRule,
    RuleSpec,
)

# Kafka rules. Source: API keys of the Kafka protocol.

API_KEYS = frozenset(
    [
        "produce",
        "fetch",
        "offsets",
        "metadata",
        "leaderandisr",
        "stopreplica",
        "updatemetadata",
        "controlledshutdown",
        "offsetcommit",
        "offsetfetch",
        "findcoordinator",
        "joingroup",
        "heartbeat",
        "leavegroup",
        "syncgroup",
        "describegroups",
        "listgroups",
        "saslhandshake",
        "apiversions",
        "createtopics",
        "deletetopics",
        "deleterecords",
        "initproducerid",
        "offsetforleaderepoch",
        "addpartitionstotxn",
        "addoffsetstotxn",
        "endtxn",
        "writetxnmarkers",
        "txnoffsetcommit",
        "describeacls",
        "createacls",
        "deleteacls",
        "describeconfigs",
        "alterconfigs",
    ]
)
_TOPIC = re.compile(r"[a-zA-Z0-9._-]+")
_VERSION_RANGE = range(-(1 << 15), 1 << 15)


def check_kafka(rule: KafkaRule) -> None:
    """Reject a Kafka rule that matches no valid request. Raises PolicyError."""
    if rule.role is not None and rule.api_key:
        raise PolicyError(f'cannot set both Role "{rule.role}" and APIKey "{rule.api_key}" together')
    if rule.api_key and rule.api_key.lower() not in API_KEYS:
        raise PolicyError(f'invalid Kafka APIKey "{rule.api_key}"')
    if rule.api_version and not _is_version(rule.api_version):
        raise PolicyError(f'invalid Kafka APIVersion "{rule.api_version}"')
    if rule.topic and not _TOPIC.fullmatch(rule.topic):
        raise PolicyError(f'invalid Kafka Topic name "{rule.topic}"')


def _is_version(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", text) is not None and int(text) in _VERSION_RANGE


MAX_PORTS = 40
"""Maximum number of ports in a ``toPorts`` entry of an allow rule."""
NO_DNS_PROXY = 'toFQDNs needs the DNS proxy: set "enable-l7-proxy", or use toCIDR or toEntities'
UNSUPPORTED_PARSER = "{} is not supported by this agent: leave it out, or allow the port without it"
NO_HOST_DNS_RULES = (
    "the DNS proxy does not serve the node itself: leave dns out, or allow the port without it"
)
NO_HOST_FQDNS = (
    "toFQDNs needs the DNS proxy, which does not serve the node itself: use toCIDR or toEntities in a policy"
    " with a nodeSelector"
)
NO_AUTH = "mutual authentication is not supported: leave authentication out, or set its mode to disabled"
NODE_SELECTORS_DISABLED = (
    'FromNodes/ToNodes rules can only be applied when the "enable-node-selector-labels" flag is set'
)


def check_subject(spec: RuleSpec, *, cluster_wide: bool) -> None:
    """Reject a rule with an invalid subject. Raises PolicyError with the path in the spec."""
    for name, selector in (
        ("endpointSelector", spec.endpoint_selector),
        ("nodeSelector", spec.node_selector),
    ):
        if selector is not None:
            with at(name):
                check_selector(selector)
    if spec.node_selector is not None and not cluster_wide:
        raise PolicyError("rule cannot have NodeSelector")


def check_allow(rule: IngressRule | EgressRule, options: PolicyOptions, *, hosts: bool) -> None:
    """Reject an invalid allow rule, then one that is unsupported.

    Raises PolicyError with the path in the rule.
    """
    if isinstance(rule, IngressRule):
        _check_ingress(rule, options, hosts=hosts)
        _check_groups("fromGroups", rule.from_groups)
    else:
        _check_egress(rule, options, hosts=hosts)
        _check_groups("toGroups", rule.to_groups)
    _check_supported(rule, options, hosts=hosts)


def check_deny(rule: IngressRule | EgressRule, options: PolicyOptions) -> None:
    """Reject an invalid deny rule. Raises PolicyError with the path in the rule."""
    if isinstance(rule, IngressRule):
        _check_selectors(fromEndpoints=rule.from_endpoints, fromRequires=rule.from_requires)
        _check_nodes(rule.from_nodes, options)
        _check_groups("fromGroups", rule.from_groups)
    else:
        _check_selectors(toEndpoints=rule.to_endpoints, toRequires=rule.to_requires)
        _check_nodes(rule.to_nodes, options)
        _check_groups("toGroups", rule.to_groups)
    for index, port in enumerate(rule.to_ports or ()):
        for number, one in enumerate(port.ports or ()):
            with at(f"toPorts[{index}].ports[{number}]"):
                _check_port(one, has_dns=False)
    _check_icmp_types(rule)


def _check_supported(rule: IngressRule | EgressRule, options: PolicyOptions, *, hosts: bool) -> None:
    """Raise UnsupportedError for features that this agent does not support."""
    if hosts and not options.dns_proxy_serves_host:
        for index, port in enumerate(rule.to_ports or ()):
            if port.rules is not None and port.rules.dns is not None:
                with at(f"toPorts[{index}].rules.dns"):
                    raise UnsupportedError(NO_HOST_DNS_RULES)
        if isinstance(rule, EgressRule) and rule.to_fqdns:
            with at("toFQDNs"):
                raise UnsupportedError(NO_HOST_FQDNS)
    if options.enable_l7_proxy and not options.supports_all_parsers:
        for index, port in enumerate(rule.to_ports or ()):
            with at(f"toPorts[{index}]"):
                _check_only_http(port)
    if isinstance(rule, EgressRule) and rule.to_fqdns and not options.has_dns_proxy:
        with at("toFQDNs"):
            raise UnsupportedError(NO_DNS_PROXY)
    if rule.demands_authentication and not options.supports_authentication:
        with at("authentication"):
            raise UnsupportedError(NO_AUTH)


def _check_only_http(port: PortRule) -> None:
    """Raise UnsupportedError for features that need another proxy than that of HTTP."""
    features = {
        "listener": port.listener,
        "serverNames": port.server_names,
        "terminatingTLS": port.terminating_tls,
        "originatingTLS": port.originating_tls,
    }
    if port.rules is not None:
        rules = port.rules
        features |= {f"rules.{name}": getattr(rules, name) for name in ("kafka", "l7proto", "l7")}
        for index, request in enumerate(rules.http or ()):
            with at(f"rules.http[{index}]"):
                _check_http_supported(request)
    for name, value in features.items():
        if value:
            with at(name):
                raise UnsupportedError(UNSUPPORTED_PARSER.format(name.removeprefix("rules.")))


def _check_http_supported(request: HTTPRule) -> None:
    """Raise UnsupportedError for HTTP rules that modify requests or refer to secrets.

    Cilium does not validate ``host``: its Envoy rejects the whole listener.
    """
    if request.host:
        try:
            compile_regexp(request.host)
        except RegexpError as error:
            raise UnsupportedError(f"host: {error}") from None
    for index, header in enumerate(request.header_matches):
        with at(f"headerMatches[{index}]"):
            if header.mismatch is not None:
                raise UnsupportedError(
                    f"mismatch {header.mismatch} is not supported by this agent: leave it out to deny"
                    " requests that do not match"
                )
            if header.secret is not None:
                raise UnsupportedError("secret is not supported by this agent: give a value")


def check_selector(selector: EndpointSelector) -> None:
    """Check that keys are valid label keys, and that values fit the operators. Raises PolicyError."""
    for key in selector.match_labels or ():
        _check_key(key, "matchLabels")
    for index, one in enumerate(selector.match_expressions or ()):
        _check_key(one.key, f"matchExpressions[{index}].key")
        check_values(index, one.operator, one.values)


def check_values(index: int, operator: str, values: Sequence[str] | None) -> None:
    """Check that ``matchExpressions[index]`` has values exactly for In and NotIn. Raises PolicyError."""
    place = f"invalid label selector: matchExpressions[{index}].values"
    if operator in ("In", "NotIn") and not values:
        raise PolicyError(f"{place}: Required value: must be specified when `operator` is 'In' or 'NotIn'")
    if operator not in ("In", "NotIn") and values:
        raise PolicyError(
            f"{place}: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
        )


def _check_key(text: str, place: str) -> None:
    """Apply Kubernetes' rules for label keys to the key with its source: ``any.app``."""
    source, colon, key = text.partition(":")
    whole = f"{source}.{key}" if colon else f"any.{text}"
    if (wrong := label_name_error(whole)) is not None:
        raise PolicyError(f'invalid label selector: {place}: Invalid value: "{whole}": {wrong}')


def _check_ingress(rule: IngressRule, options: PolicyOptions, *, hosts: bool) -> None:
    members: dict[str, Sized | None] = {
        "FromEndpoints": rule.from_endpoints,
        "FromCIDR": rule.from_cidr,
        "FromCIDRSet": rule.from_cidr_set,
        "FromEntities": rule.from_entities,
        "FromNodes": rule.from_nodes,
        "FromGroups": rule.from_groups,
    }
    _check_one_member(members)
    kinds = _l7_kinds(rule.to_ports)
    if kinds and hosts:
        raise PolicyError("L7 policy is not supported on host ingress yet")
    _check_l7_enabled(kinds, options)
    if "DNS" in kinds:
        raise PolicyError("L7 protocol DNS is not supported on ingress yet")
    _check_icmp_enabled(rule, options)
    _check_selectors(fromEndpoints=rule.from_endpoints, fromRequires=rule.from_requires)
    _check_layer4(rule, ingress=True)
    _check_selectors(fromNodes=rule.from_nodes)
    _check_cidr_set("fromCIDRSet", rule.from_cidr_set)
    _check_nodes(rule.from_nodes, options)


def _check_egress(rule: EgressRule, options: PolicyOptions, *, hosts: bool) -> None:
    members: dict[str, Sized | None] = {
        "ToCIDR": rule.to_cidr,
        "ToCIDRSet": rule.to_cidr_set,
        "ToEndpoints": rule.to_endpoints,
        "ToEntities": rule.to_entities,
        "ToServices": rule.to_services,
        "ToFQDNs": rule.to_fqdns,
        "ToGroups": rule.to_groups,
        "ToNodes": rule.to_nodes,
    }
    _check_one_member(members)
    if rule.to_services and rule.to_ports:
        raise PolicyError("Combining ToServices and ToPorts is not supported yet")
    kinds = _l7_kinds(rule.to_ports)
    _check_l7_enabled(kinds, options)
    if hosts:
        for kind in ("HTTP", "Kafka"):
            if kind in kinds:
                raise PolicyError(f"L7 protocol {kind} is not supported on host egress yet")
    _check_icmp_enabled(rule, options)
    _check_selectors(toEndpoints=rule.to_endpoints, toRequires=rule.to_requires)
    _check_layer4(rule, ingress=False)
    _check_selectors(toNodes=rule.to_nodes)
    _check_cidr_set("toCIDRSet", rule.to_cidr_set)
    _check_nodes(rule.to_nodes, options)


def _check_one_member(members: Mapping[str, Sized | None]) -> None:
    given = [name for name, value in members.items() if value]
    if len(given) > 1:
        raise PolicyError(f"Combining {given[0]} and {given[1]} is not supported yet")


def _l7_kinds(ports: Sequence[PortRule] | None) -> set[str]:
    kinds = set()
    for port in ports or ():
        if port.rules is not None:
            kinds |= {
                name
                for name, rules in (
                    ("HTTP", port.rules.http),
                    ("Kafka", port.rules.kafka),
                    ("DNS", port.rules.dns),
                    ("L7", port.rules.l7),
                )
                if rules
            }
    return kinds


def _check_l7_enabled(kinds: set[str], options: PolicyOptions) -> None:
    if kinds and not options.enable_l7_proxy:
        raise PolicyError("L7 policy is not supported since L7 proxy is not enabled")


def _check_icmp_enabled(rule: IngressRule | EgressRule, options: PolicyOptions) -> None:
    if rule.icmps and not options.enable_icmp_rules:
        raise PolicyError('ICMP rules can only be applied when the "enable-icmp-rules" flag is set')
    if rule.icmps and rule.to_ports:
        raise PolicyError(
            "The ICMPs block may only be present without ToPorts. Define a separate rule to use ToPorts."
        )


def _check_layer4(rule: IngressRule | EgressRule, *, ingress: bool) -> None:
    for index, port in enumerate(rule.to_ports or ()):
        with at(f"toPorts[{index}]"):
            if len(port.ports or ()) > MAX_PORTS:
                raise PolicyError(f"too many ports, the max is {MAX_PORTS}", path="ports", stage="schema")
            _check_port_rule(port, ingress=ingress)
    _check_icmp_types(rule)


def _check_icmp_types(rule: IngressRule | EgressRule) -> None:
    for index, icmp in enumerate(rule.icmps or ()):
        for number, field in enumerate(icmp.fields or ()):
            with at(f"icmps[{index}].fields[{number}]"):
                icmp_type(field)


def _check_port_rule(rule: PortRule, *, ingress: bool) -> None:
    has_rules = rule.rules is not None and not rule.rules.empty
    has_dns = rule.rules is not None and bool(rule.rules.dns)
    if rule.server_names and has_rules and rule.terminating_tls is None:
        raise PolicyError("ServerNames are not allowed with L7 rules without TLS termination")
    if "" in (rule.server_names or ()):
        raise PolicyError("Empty server name is not allowed")
    zero = False
    for index, port in enumerate(rule.ports or ()):
        with at(f"ports[{index}]"):
            zero |= _check_port(port, has_dns=has_dns)
            if has_rules and not has_dns and port.protocol != "TCP":
                raise PolicyError(
                    f"L7 rules can only apply to TCP (not {port.protocol}) except for DNS rules"
                )
    if rule.listener is not None:
        if ingress:
            raise PolicyError(f"Listener is not allowed on ingress ({rule.listener.name})")
        if has_rules:
            raise PolicyError(f"Listener is not allowed with L7 rules ({rule.listener.name})")
    if rule.rules is not None and has_rules:
        if zero:
            raise PolicyError("L7 rules can not be used when a port is 0")
        with at("rules"):
            _check_l7_rules(rule.rules, has_ports=bool(rule.ports))


def _check_port(port: PortProtocol, *, has_dns: bool) -> bool:
    """Check a port; return whether it is port 0."""
    if is_service_name(port.port):
        return False
    number = port_number(port.port)
    if has_dns and port.end_port > number:
        raise PolicyError("DNS rules do not support port ranges")
    return number == 0


def _check_l7_rules(rules: L7Rules, *, has_ports: bool) -> None:
    for index, request in enumerate(rules.http or ()):
        with at(f"http[{index}]"):
            _check_http(request)
    for index, kafka in enumerate(rules.kafka or ()):
        with at(f"kafka[{index}]"):
            check_kafka(kafka)
    if rules.dns and not has_ports:
        raise PolicyError("Port 53 must be specified for DNS rules")
    if rules.l7 is not None and not rules.l7proto:
        raise PolicyError("'l7' may only be specified when a 'l7proto' is also specified")
    for index, pairs in enumerate(rules.l7 or ()):
        if "" in pairs:
            with at(f"l7[{index}]"):
                raise PolicyError("Empty key not allowed")


def _check_http(request: HTTPRule) -> None:
    for name, text in (("path", request.path), ("method", request.method)):
        if text:
            with at(name):
                check_regex(text)
    for index, header in enumerate(request.header_matches):
        if header.secret is not None and not header.secret.name:
            with at(f"headerMatches[{index}]"):
                raise PolicyError("Secret name missing")


def check_regex(text: str) -> None:
    """Reject a regular expression that RE2 does not support. Raises PolicyError."""
    try:
        compile_regexp(text)
    except RegexpError as error:
        raise PolicyError(str(error)) from None


def _check_selectors(**lists: Sequence[EndpointSelector] | None) -> None:
    for name, selectors in lists.items():
        for index, selector in enumerate(selectors or ()):
            with at(f"{name}[{index}]"):
                check_selector(selector)


def _check_nodes(selectors: Sequence[EndpointSelector] | None, options: PolicyOptions) -> None:
    if selectors and not options.enable_node_selector_labels:
        raise PolicyError(NODE_SELECTORS_DISABLED)


def _check_groups(name: str, groups: Sequence[object] | None) -> None:
    if groups:
        with at(name):
            raise UnsupportedError(
                "groups of a cloud provider are not supported: use a CIDR set or a CiliumCIDRGroup"
            )


def _check_cidr_set(name: str, rules: Sequence[CIDRRule] | None) -> None:
    for index, rule in enumerate(rules or ()):
        if rule.cidr is not None:
            with at(f"{name}[{index}]"):
                check_exceptions(rule.cidr, rule.excepted)


def check_exceptions(cidr: str, exceptions: Sequence[str]) -> None:
    """Check that exceptions lie inside the prefix. Raises PolicyError."""
    prefix = ip_network(cidr, strict=False)
    for text in exceptions:
        if not contains(prefix, ip_network(text, strict=False)):
            raise PolicyError(f"allow CIDR prefix {cidr} does not contain exclude CIDR prefix {text}")
