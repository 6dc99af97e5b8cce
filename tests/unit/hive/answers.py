"""An agent's responses to commands."""

from __future__ import annotations

import os
import sys

TREE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""A child process imports this tree, as the test does, not an installed package."""
ENDPOINTS = [
    {
        "id": 1234,
        "status": {
            "state": "ready",
            "identity": {"id": 24583},
            "labels": {"security-relevant": ["k8s:io.kubernetes.pod.namespace=default", "k8s:app=web"]},
            "external-identifiers": {"pod-name": "shop/web-0"},
            "networking": {"addressing": [{"ipv4": "10.0.1.77", "ipv6": "fd00:10:1::77"}]},
            "policy": {"realized": {"policy-enabled": "both"}},
        },
    },
    {
        "id": 900,
        "status": {
            "state": "not-ready",
            "identity": {"id": 24584},
            "labels": {"security-relevant": ["k8s:app=db"]},
            "external-identifiers": {"pod-name": "shop/db"},
            "networking": {"addressing": [{"ipv4": "10.0.1.80"}]},
            "policy": {"realized": {"policy-enabled": "audit-ingress"}},
        },
    },
    {
        "id": 901,
        "status": {
            "state": "ready",
            "identity": {"id": 24585},
            "labels": {"security-relevant": ["k8s:app=db"]},
            "external-identifiers": {"pod-name": "store/db"},
            "networking": {"addressing": [{"ipv4": "10.0.1.81"}]},
            "policy": {"realized": {"policy-enabled": "none"}},
        },
    },
]
HEALTHY = {
    "cilium": {"state": "Ok", "msg": "0.1.0"},
    "cni-file": {"state": "Ok", "msg": "successfully wrote CNI configuration file to /x/05-cilium.conflist"},
    "cni-chaining": {"mode": "none"},
    "ipam": {"status": "IPv4: 2/65534 allocated from 10.10.0.0/16, ", "allocations": {"10.10.0.5": "router"}},
    "attach-mode": "tc",
    "datapath-mode": "veth",
    "controllers": [],
}
