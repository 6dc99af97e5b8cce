"""The faults of a graph, by what is drawn of them."""

from collections import defaultdict

from lifecycle.graph.parts import Parts

__all__ = ["Marks"]

WORDS = {"cycle": "in a cycle", "constructor": "cannot be used", "invoke": "cannot be used"}
"""The title for a fault of this kind; else the kind itself."""


class Marks:
    """What is wrong with each constructor and arrow, and what is needed but not there."""

    def __init__(self, graph: Parts) -> None:
        self._words: dict[str, dict[str, None]] = defaultdict(dict)
        self.edges: set[tuple[str, str]] = set()
        """From who needs to what is needed: those of cycles."""
        self.lacking: list[tuple[str, str, str]] = []
        """Who needs it, the type it needs and does not get, and why: missing or private."""
        for fault in graph.faults:
            if fault.kind == "cycle":
                self.edges.update(zip(fault.nodes, (*fault.nodes[1:], *fault.nodes[:1]), strict=True))
            for node in fault.nodes:
                if fault.lacks:
                    self.lacking.append((node, fault.lacks, fault.kind))
                else:
                    self._words[node][WORDS.get(fault.kind, fault.kind)] = None

    def of(self, node: str) -> list[str]:
        """What is wrong with the constructor or invoked function itself, in a word or two each."""
        return list(self._words.get(node, ()))

    @property
    def lacks(self) -> dict[str, str]:
        """The types that are needed and not there, each with why."""
        return {lacks: kind for _, lacks, kind in self.lacking}
