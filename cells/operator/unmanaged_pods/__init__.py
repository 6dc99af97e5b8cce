"""Pods that run without an endpoint, because they started before the agent did, are started again.

Controller: pods and CiliumEndpoints in, deletions of pods out.
Needs:      ClusterAPI, ClusterObjects, UnmanagedPodSettings, Metrics.   Gives: UnmanagedPods.
Why:        cluster DNS often starts first, on another network: no policy holds for it, and others do not
            reach it.
"""

from cells.operator.unmanaged_pods.watcher import UnmanagedPods, UnmanagedPodSettings, tell
from lifecycle import config, invoke, module, provide

__all__ = ["UnmanagedPodSettings", "UnmanagedPods", "cell"]

cell = module(
    "unmanaged-pods",
    "Pods that run without an endpoint",
    config(UnmanagedPodSettings),
    provide(UnmanagedPods),
    invoke(tell),
)
