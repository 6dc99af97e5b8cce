"""Manifests of a service for pods, and a check that it is reachable."""

from __future__ import annotations

import socket
import threading

from hive.lab import pods
from hive.lab.namespaces import inside
from hive.lab.node import Lab

VIP, PORT, TARGET = "10.96.0.10", 80, 8080


def manifests(*backends: str) -> str:
    endpoints = ", ".join(f"{{addresses: [{ip}]}}" for ip in backends)
    return f"""
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{clusterIP: {VIP}, clusterIPs: [{VIP}], ports: [{{name: http, port: {PORT}}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
endpoints: [{endpoints}]
ports: [{{name: http, port: {TARGET}}}]
"""


def reached(lab: Lab, client: pods.Attached, server: pods.Attached) -> bool:
    """Return whether the service leads from one pod to the other, which sees the pod's own address."""
    with lab.open_pod(client.pod) as calling, lab.open_pod(server.pod) as called:
        with inside(called):
            listener = socket.create_server(("", TARGET))
        with inside(calling):
            outgoing = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        seen: list[str] = []

        def accept() -> None:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            seen.append(peer[0])
            connection.close()

        with listener, outgoing:
            listener.settimeout(5)
            outgoing.settimeout(5)
            thread = threading.Thread(target=accept)
            thread.start()
            try:
                outgoing.connect((VIP, PORT))
            except OSError:
                return False
            finally:
                thread.join()
        return seen == [client.ipv4]
