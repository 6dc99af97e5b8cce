"""The schema of CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy.

Source: Cilium 1.17, custom resources of group cilium.io. Alternations in patterns are grouped here, so that
both anchors apply to every alternative. The policy engine rejects what a schema cannot express.
"""

from __future__ import annotations

from typing import Final, get_args

from cells.operator.crds.schema import (
    CIDR,
    FLAG,
    SELECTOR,
    TEXT,
    TIME,
    Schema,
    exactly_one,
    items,
    matched,
    obj,
    string_enum,
    texts,
    within,
)
from cells.policy.rules.schema import Entity

PORT: Final = (
    r"^(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})"
    r"|([a-zA-Z0-9]-?)*[a-zA-Z](-?[a-zA-Z0-9])*$"
)
"""A value that starts with a port's number or ends with a name.

Cilium's pattern has the same gap; objects that passed it remain writable, and their condition Valid is False.
"""
SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ICMP_NAMES: Final = (
    "EchoReply|DestinationUnreachable|Redirect|Echo|RouterAdvertisement|RouterSelection|TimeExceeded"
    "|ParameterProblem|Timestamp|TimestampReply|Photuris|ExtendedEchoRequest|ExtendedEchoReply|PacketTooBig"
    "|EchoRequest|MulticastListenerQuery|MulticastListenerReport|MulticastListenerDone|RouterSolicitation"
    "|NeighborSolicitation|NeighborAdvertisement|RedirectMessage|RouterRenumbering"
    "|ICMPNodeInformationQuery|ICMPNodeInformationResponse|InverseNeighborDiscoverySolicitation"
    "|InverseNeighborDiscoveryAdvertisement|HomeAgentAddressDiscoveryRequest"
    "|HomeAgentAddressDiscoveryReply|MobilePrefixSolicitation|MobilePrefixAdvertisement"
    "|DuplicateAddressRequestCodeSuffix|DuplicateAddressConfirmationCodeSuffix"
)
ICMP_TYPE: Final[Schema] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": f"^([0-9]|[1-9][0-9]|1[0-9]{{2}}|2[0-4][0-9]|25[0-5]|{ICMP_NAMES})$",
    "x-kubernetes-int-or-string": True,
}
ENTITY: Final = string_enum(*get_args(Entity))

_ICMPS: Final = items(
    obj(
        fields=items(
            obj("type", family={**string_enum("IPv4", "IPv6"), "default": "IPv4"}, type=ICMP_TYPE),
            maxItems=40,
        )
    )
)
_CIDR_SET: Final = items(
    exactly_one(
        "cidr cidrGroupRef cidrGroupSelector",
        obj(
            cidr=CIDR,
            cidrGroupRef=matched(SUBDOMAIN, maxLength=253),
            cidrGroupSelector=SELECTOR,
            **{"except": items(CIDR)},
        ),
    )
)
_FQDNS: Final = items(
    exactly_one(
        "matchName matchPattern",
        obj(
            matchName=matched(r"^([-a-zA-Z0-9_]+[.]?)+$", maxLength=255),
            matchPattern=matched(r"^([-a-zA-Z0-9_*]+[.]?)+$", maxLength=255),
        ),
    )
)
_GROUPS: Final = items(
    obj(aws=obj(labels=texts(), region=TEXT, securityGroupsIds=items(TEXT), securityGroupsNames=items(TEXT)))
)
_PORTS: Final = items(
    obj(
        "port",
        endPort=within(0, 65535, "int32"),
        port=matched(PORT),
        protocol=string_enum("TCP", "UDP", "SCTP", "ANY"),
    ),
    maxItems=40,
)
_NAMED: Final[Schema] = {"type": "string", "minLength": 1}
_SECRET: Final = obj("name", name=TEXT, namespace=TEXT)
_TLS: Final = obj("secret", certificate=TEXT, privateKey=TEXT, secret=_SECRET, trustedCA=TEXT)
_HTTP: Final = items(
    obj(
        headerMatches=items(
            obj(
                "name",
                mismatch=string_enum("LOG", "ADD", "DELETE", "REPLACE"),
                name=_NAMED,
                secret=_SECRET,
                value=TEXT,
            )
        ),
        headers=items(TEXT),
        host={"type": "string", "format": "idn-hostname"},
        method=TEXT,
        path=TEXT,
    )
)
_KAFKA: Final = items(
    obj(
        apiKey=TEXT,
        apiVersion=TEXT,
        clientID=TEXT,
        role=string_enum("produce", "consume"),
        topic={"type": "string", "maxLength": 255},
    )
)
_TO_PORTS: Final = items(
    obj(
        listener=obj(
            "envoyConfig name",
            envoyConfig=obj(
                "name", kind=string_enum("CiliumEnvoyConfig", "CiliumClusterwideEnvoyConfig"), name=_NAMED
            ),
            name=_NAMED,
            priority=within(1, 100),
        ),
        originatingTLS=_TLS,
        ports=_PORTS,
        rules=exactly_one(
            "http kafka dns l7proto",
            obj(dns=_FQDNS, http=_HTTP, kafka=_KAFKA, l7=items(texts()), l7proto=TEXT),
        ),
        serverNames=items(TEXT),
        terminatingTLS=_TLS,
    )
)
_DENIED_PORTS: Final = items(obj(ports=_PORTS))
_SERVICES: Final = items(
    obj(
        k8sService=obj(namespace=TEXT, serviceName=TEXT),
        k8sServiceSelector=obj("selector", namespace=TEXT, selector=SELECTOR),
    )
)
_AUTHENTICATION: Final = obj("mode", mode=string_enum("disabled", "required", "test-always-fail"))
_SELECTORS: Final = items(SELECTOR)


def _peers(direction: str) -> dict[str, Schema]:
    """Return the properties of peers that allow and deny rules share; ``direction`` is ``to`` or ``from``."""
    shared = {
        "CIDR": items(CIDR),
        "CIDRSet": _CIDR_SET,
        "Endpoints": _SELECTORS,
        "Entities": items(ENTITY),
        "Groups": _GROUPS,
        "Nodes": _SELECTORS,
        "Requires": _SELECTORS,
    }
    return {"icmps": _ICMPS, **{f"{direction}{name}": schema for name, schema in shared.items()}}


_RULE: Final = exactly_one(
    "endpointSelector nodeSelector",
    obj(
        description=TEXT,
        egress=items(
            obj(
                authentication=_AUTHENTICATION,
                toFQDNs=_FQDNS,
                toPorts=_TO_PORTS,
                toServices=_SERVICES,
                **_peers("to"),
            )
        ),
        egressDeny=items(obj(toPorts=_DENIED_PORTS, toServices=_SERVICES, **_peers("to"))),
        enableDefaultDeny=obj(egress=FLAG, ingress=FLAG),
        endpointSelector=SELECTOR,
        ingress=items(obj(authentication=_AUTHENTICATION, toPorts=_TO_PORTS, **_peers("from"))),
        ingressDeny=items(obj(toPorts=_DENIED_PORTS, **_peers("from"))),
        labels=items(obj("key", key=TEXT, source=TEXT, value=TEXT)),
        nodeSelector=SELECTOR,
    ),
)
_CONDITION: Final = obj(
    "status type", lastTransitionTime=TIME, message=TEXT, reason=TEXT, status=TEXT, type=TEXT
)
_DERIVATIVE: Final = obj(
    annotations=texts(),
    enforcing=FLAG,
    error=TEXT,
    lastUpdated=TIME,
    localPolicyRevision={"type": "integer", "format": "int64"},
    ok=FLAG,
)

POLICY: Final = obj(
    "metadata",
    metadata={"type": "object"},
    spec=_RULE,
    specs=items(_RULE),
    status=obj(
        conditions={
            **items(_CONDITION),
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
        derivativePolicies=texts(_DERIVATIVE),
    ),
)
