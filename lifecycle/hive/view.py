"""A hive as it shows itself to those inside it who answer questions about it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lifecycle.injection.profile import Profile
from lifecycle.settings.sources import Loaded

if TYPE_CHECKING:
    from lifecycle.graph.timeline import Timeline
    from lifecycle.graph.value import Graph

__all__ = ["HiveView"]


class HiveView:
    """What the hive is made of and how its start went. Reading it starts and changes nothing."""

    __slots__ = ("_graph", "_load", "_loaded", "_profile")

    def __init__(
        self,
        graph: "Callable[[], Graph]",
        profile: Profile,
        loaded: Callable[[], Loaded],
        load: Callable[[Sequence[Path]], Loaded],
    ) -> None:
        self._graph = graph
        self._profile = profile
        self._load = load
        self._loaded = loaded

    @property
    def loaded(self) -> Loaded:
        """The settings that are in force, with their origins."""
        return self._loaded()

    def load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        """The settings as a new start would load them now; reads files, changes nothing.

        `config_dirs`, if there are any, stand for the config-dir, the last counting most.
        """
        return self._load(config_dirs)

    def graph(self) -> "Graph":
        """The graph; read from the source files too, so some 10 ms of work: not for a busy event loop."""
        return self._graph()

    def timeline(self, graph: "Graph") -> "Timeline":
        """What every constructor and hook of `graph`, as graph() gave it, has taken so far."""
        from lifecycle.graph.timeline import timeline_of  # who only runs a hive never asks

        return timeline_of(graph, self._profile)
