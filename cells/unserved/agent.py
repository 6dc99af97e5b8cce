"""The agent's own ways, and the runtime's: options that are not served yet.

Needs: nothing.   Gives: UnservedAgent.
Who builds one takes it away from here: it is then a setting of the cell that serves it.
"""

from collections.abc import Mapping
from typing import ClassVar

from cells.unserved.refusal import UnservedSettings


class UnservedAgent(UnservedSettings, frozen=True):
    """The agent's own behaviour, and the runtime's."""

    also: ClassVar[Mapping[str, tuple[object, ...]]] = {"container_ip_local_reserved_ports": ("",)}

    container_ip_local_reserved_ports: str = "auto"
    """No ports are reserved in pods: nothing here needs any. Nothing is accepted too."""

    cni_external_routing: bool = False
    """Routing of pods is never left to other plugins; see cni-chaining-mode for chains."""

    restore: bool = True
    """Pods live on through a restart of the agent."""

    keep_config: bool = False
    """Each start reads its settings anew."""

    debug_verbose: str = ""
    """There is one level of debug, for everything."""

    pprof: bool = False
    """Profiles are not served; see `hive inspect --timeline` for the start."""

    dry_mode: bool = False
    """There is no agent that does nothing; `hive inspect` shows one without starting it."""
