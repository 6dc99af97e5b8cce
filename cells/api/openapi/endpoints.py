"""Describes the operations that create pods' endpoints: configuration, health, endpoints, addresses.

Source: Cilium 1.17, api/v1/openapi.yaml.
"""

from __future__ import annotations

from typing import Literal

from cells.api import models
from cells.api.models.status import StatusResponse
from cells.api.openapi.described import Body, Described, bare, error, header, ok, path, problem, query

ONE = "/v1/endpoint/{id}"
ENDPOINT = path(
    "id",
    "An endpoint, as prefix:name with the prefixes cilium-local, container-id, container-name, "
    "cni-attachment-id, pod-name, cep-name, ipv4 and ipv6; without a prefix, its number.",
    example="cni-attachment-id:9f86d081884c:eth0",
)
FOUND = {
    name: {"id": "$response.body#/id"}
    for name in (
        "GetEndpointID",
        "GetEndpointIDHealthz",
        "GetEndpointIDLog",
        "GetEndpointIDLabels",
        "GetEndpointIDConfig",
        "PatchEndpointIDLabels",
        "PatchEndpointIDConfig",
        "DeleteEndpointID",
    )
}
NOT_FOUND = bare(404, "There is no such endpoint.")
LABELS = Body(
    list[str],
    "Only those that have all these labels, written source:key=value.",
    required=False,
    example=["k8s:app=web"],
)
DELETED = ok("It was removed."), ok("It was removed; the body is the number of errors.", int, status=206)
OWNER = query("owner", "Owner of the address, shown to people: namespace/pod.", example="default/web-0")
POOL = query("pool", "The pool of the address.", example="default")
REQUEST = {
    "state": "waiting-for-identity",
    "container-id": "9f86d081884c",
    "container-interface-name": "eth0",
    "interface-name": "lxc0123456789ab",
    "interface-index": 12,
    "mac": "02:00:00:00:00:02",
    "host-mac": "02:00:00:00:00:01",
    "addressing": {"ipv4": "10.0.1.77", "ipv4-pool-name": "default"},
    "k8s-namespace": "default",
    "k8s-pod-name": "web-0",
    "labels": ["k8s:app=web"],
    "datapath-configuration": {"external-ipam": True},
}

OPERATIONS = (
    Described(
        "GET",
        "/v1/config",
        "The agent's configuration, and what pods on this node need",
        (ok("The configuration.", models.DaemonConfiguration),),
    ),
    Described(
        "PATCH",
        "/v1/config",
        "Change the policy enforcement, or an option",
        (
            ok("Every endpoint has the new configuration."),
            error(400, "Unknown option, or invalid value."),
            error(500, "Some endpoints do not have it yet."),
        ),
        body=Body(
            models.DaemonConfigurationSpec,
            "The options to change; others stay as they are.",
            example={"policy-enforcement": "default", "options": {"DropNotification": "Enabled"}},
        ),
    ),
    Described(
        "GET",
        "/v1/healthz",
        "Status of the agent",
        (ok("The status, whether the agent is healthy or not.", StatusResponse),),
        (
            header("brief", "Only the overall state, and at most one failing controller."),
            header("require-k8s-connectivity", "Accepted and ignored."),
        ),
    ),
    Described(
        "GET",
        "/v1/endpoint",
        "All endpoints, or those with some labels",
        (ok("The endpoints.", list[models.EndpointModel]), bare(404, "None has these labels.")),
        body=LABELS,
    ),
    Described(
        "DELETE",
        "/v1/endpoint",
        "Delete the endpoints of a container",
        (*DELETED, error(400, "No container is named."), error(404, "The container has none.")),
        body=Body(
            models.EndpointBatchDeleteRequest,
            "The container to delete.",
            example={"container-id": "9f86d081884c"},
        ),
    ),
    Described(
        "GET",
        ONE,
        "An endpoint",
        (
            ok("The endpoint.", models.EndpointModel),
            error(400, "This is not a valid endpoint ID."),
            NOT_FOUND,
        ),
        (ENDPOINT,),
    ),
    Described(
        "PUT",
        ONE,
        "Create an endpoint for an existing link",
        (
            ok("The endpoint, ready.", models.EndpointModel, status=201, links=FOUND),
            error(400, "The request is invalid, or the endpoint exists already."),
            error(500, "The endpoint could not be created."),
        ),
        (path("id", "Ignored; clients send cilium-local:0.", example="cilium-local:0"),),
        body=Body(models.EndpointChangeRequest, "The endpoint.", example=REQUEST),
    ),
    Described(
        "DELETE",
        ONE,
        "Delete an endpoint",
        (*DELETED, error(400, "This is not a valid endpoint ID."), NOT_FOUND),
        (ENDPOINT,),
    ),
    Described(
        "GET",
        f"{ONE}/healthz",
        "Whether an endpoint works",
        (ok("Its health.", models.EndpointHealth), bare(400, "This is not a valid endpoint ID."), NOT_FOUND),
        (ENDPOINT,),
    ),
    Described(
        "GET",
        f"{ONE}/log",
        "The log of an endpoint",
        (
            ok("The log, newest first.", list[models.EndpointStatusChange]),
            bare(400, "This is not a valid endpoint ID."),
            NOT_FOUND,
        ),
        (ENDPOINT,),
    ),
    Described(
        "GET",
        f"{ONE}/labels",
        "The labels of an endpoint",
        (ok("Its labels.", models.LabelConfiguration), NOT_FOUND),
        (ENDPOINT,),
    ),
    Described(
        "PATCH",
        f"{ONE}/labels",
        "Set the user's labels of an endpoint",
        (
            ok("The labels are set."),
            NOT_FOUND,
            error(500, "The labels are invalid, or the regeneration failed."),
        ),
        (ENDPOINT,),
        body=Body(
            models.LabelConfigurationSpec,
            "The complete list of the user's labels.",
            example={"user": ["any:tier=front"]},
        ),
    ),
    Described(
        "GET",
        f"{ONE}/config",
        "The options of an endpoint",
        (ok("Its options.", models.EndpointConfigurationStatus), NOT_FOUND),
        (ENDPOINT,),
    ),
    Described(
        "PATCH",
        f"{ONE}/config",
        "Change the options of an endpoint",
        (
            ok("The options are in force."),
            bare(400, "The option cannot be changed, or the value is invalid."),
            NOT_FOUND,
            error(500, "The regeneration failed."),
        ),
        (ENDPOINT,),
        body=Body(
            models.EndpointConfigurationSpec,
            "The options to change.",
            example={"options": {"SourceIPVerification": "Enabled"}},
        ),
    ),
    Described(
        "POST",
        "/v1/ipam",
        "Allocate the next free address of each family",
        (
            ok(
                "The addresses; all or none.",
                models.IPAMResponse,
                status=201,
                links={"DeleteIPAMIP": {"ip": "$response.body#/address/ipv4"}},
            ),
            problem(422, "Unknown address family."),
            error(502, "No address is free, or the address family is disabled."),
        ),
        (
            query("family", "Only this address family.", kind=Literal["ipv4", "ipv6"], example="ipv4"),
            OWNER,
            POOL,
            header(
                "expiration",
                "Whether to release the addresses unless an endpoint uses them within ten minutes.",
            ),
        ),
    ),
    Described(
        "POST",
        "/v1/ipam/{ip}",
        "Allocate the given address",
        (ok("The address is allocated."), error(500, "It is in use, or not in this node's pod ranges.")),
        (path("ip", "The address.", example="10.0.1.78"), OWNER, POOL),
    ),
    Described(
        "DELETE",
        "/v1/ipam/{ip}",
        "Release an address",
        (
            ok("The address is released."),
            bare(400, "This is not an address."),
            error(500, "An endpoint or the router uses the address, or the pool is missing."),
        ),
        (path("ip", "The address.", example="10.0.1.78"), POOL),
    ),
)
