"""Several lab nodes as one cluster: the network between them, their objects, their etcd and BGP router."""

from hive.lab.cluster.cluster import MOST_NODES, TUNNEL, Cluster, add_pod, remove_pod

__all__ = ["MOST_NODES", "TUNNEL", "Cluster", "add_pod", "remove_pod"]
