"""Read access to a hive, for cells inside it that show it."""

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
    """The composition of the hive and the timings of its start. Reading starts and changes nothing."""

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
        """The settings in force, with their origins."""
        return self._loaded()

    def load(self, config_dirs: Sequence[Path] = ()) -> Loaded:
        """Return the settings as a new start would load them now. Reads files.

        `config_dirs`, if given, replace the config-dir; the last one has precedence.
        """
        return self._load(config_dirs)

    def graph(self) -> "Graph":
        """Return the graph. Also reads source files, which takes some 10 ms: not for a busy event loop."""
        return self._graph()

    def timeline(self, graph: "Graph") -> "Timeline":
        """Return the timings of every constructor and hook of `graph`, which graph() returned."""
        from lifecycle.graph.timeline import timeline_of  # not imported to run a hive

        return timeline_of(graph, self._profile)
