"""The objects of Kubernetes as tables, from API servers or from a folder of manifests.

Source: fills one table per kind; nothing downstream can tell which source it was. Without a source the
        tables are initialized and empty.
Needs:  AgentConfig, KubernetesSettings.
Gives:  Resources (``table(PODS)`` and the like), KubernetesAPI (the client of those who write),
        Table[SourceStatus], Table[ForgottenObject], Table[ManifestFile].
Why:    a table changes only by what is known: an unreachable server or a broken file changes nothing.
"""

from cells.kubernetes import objects
from cells.kubernetes.cell import cell
from cells.kubernetes.manifests import ManifestFile, wrong_value
from cells.kubernetes.object_events import EventDraft, EventSource, Regarding
from cells.kubernetes.objects import *  # noqa: F403  # its own list, which is part of ours below
from cells.kubernetes.resources import Resources
from cells.kubernetes.settings import KubernetesSettings
from cells.kubernetes.source import SourceStatus
from cells.kubernetes.source.api_server import KubernetesAPI
from cells.kubernetes.source.forgotten import ForgottenObject

__all__ = [
    "EventDraft",
    "EventSource",
    "ForgottenObject",
    "KubernetesAPI",
    "KubernetesSettings",
    "ManifestFile",
    "Regarding",
    "Resources",
    "SourceStatus",
    "cell",
    "wrong_value",
]
__all__ += objects.__all__
