"""The faults of a graph, by constructor and edge."""

from collections import defaultdict

from lifecycle.graph.parts import Parts

__all__ = ["Marks"]

WORDS = {"cycle": "in a cycle", "constructor": "cannot be used", "invoke": "cannot be used"}
"""The title of a fault of this kind; otherwise the kind itself."""


class Marks:
    """The faults of each constructor and edge, and missing dependencies."""

    def __init__(self, graph: Parts) -> None:
        self._words: dict[str, dict[str, None]] = defaultdict(dict)
        self.edges: set[tuple[str, str]] = set()
        """Edges of cycles, from the constructor that needs to the one needed."""
        self.lacking: list[tuple[str, str, str]] = []
        """Constructors with a missing type, that type, and why: missing or private."""
        for fault in graph.faults:
            if fault.kind == "cycle":
                self.edges.update(zip(fault.nodes, (*fault.nodes[1:], *fault.nodes[:1]), strict=True))
            for node in fault.nodes:
                if fault.lacks:
                    self.lacking.append((node, fault.lacks, fault.kind))
                else:
                    self._words[node][WORDS.get(fault.kind, fault.kind)] = None

    def of(self, node: str) -> list[str]:
        """Return the faults of the constructor or invoked function itself, in a word or two each."""
        return list(self._words.get(node, ()))

    @property
    def lacks(self) -> dict[str, str]:
        """The missing types, each with the reason."""
        return {lacks: kind for _, lacks, kind in self.lacking}
