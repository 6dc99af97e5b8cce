"""Answers the queries of the page with the agents of all nodes, for ``hive cluster ui``.

The page names nodes that do not answer, with the error; the others are shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from cells.kubernetes.client.errors import KubernetesError
from hive.agents import AgentError, Agents, Answer
from hive.policy.all_nodes import explain_on_all_nodes
from hive.ui.flows import merged_flows

MOST_ENDS: Final = 120
"""Maximum number of identities of pods on each side of the matrix."""
_WORST: Final = ("allowed", "elsewhere", "mixed", "denied")

Matrix = Mapping[str, Any]


class ClusterAnswers:
    """Answers for all nodes."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._answers: Mapping[str, Callable[[Mapping[str, str]], Awaitable[Any]]] = {
            "flows": partial(self._merged, "flows", merged_flows),
            "policy": partial(self._merged, "policy", merged_matrix),
            "explain": self._explain,
            "nodes": self._nodes,
            "inside": lambda query: agents.ask(query.get("node", ""), "inside", {}),
            "health": lambda query: agents.ask(query.get("node", ""), "health", {}),
        }

    async def answer(self, name: str, query: Mapping[str, str]) -> Answer:
        """Return an HTTP status and the body."""
        if name not in self._answers:
            return 404, {"error": f"unknown question {name[:20]}"}
        try:
            return 200, await self._answers[name](query)
        except AgentError as error:
            return error.status or 502, {"error": str(error)}
        except KubernetesError as error:
            return 502, {"error": f"API server: {error}"}

    async def _merged(
        self, name: str, merge: Callable[[Mapping[str, Any]], dict[str, Any]], query: Mapping[str, str]
    ) -> Any:
        answers, problems = await self._agents.ask_all(name, query)
        return {**merge(answers), "problems": problems, "answering": len(answers)}

    async def _explain(self, query: Mapping[str, str]) -> Any:
        return msgspec.to_builtins(await explain_on_all_nodes(self._agents, query))

    async def _nodes(self, query: Mapping[str, str]) -> Any:
        answers, problems = await self._agents.ask_all("nodes", query)
        views = {node: next(iter(one["views"].values())) for node, one in answers.items()}
        return {"views": views, "problems": problems}


def merged_matrix(answers: Mapping[str, Matrix]) -> dict[str, Any]:
    """Merge the matrices of several nodes.

    Each node decides egress of its pods and ingress to them. A cell is allowed if both are; it is
    ``elsewhere`` if no answering node decides one of them.
    """
    sources, destinations = _Ends(), _Ends()
    cells: dict[tuple[int, int], _Cell] = {}
    for matrix in answers.values():
        ours = [sources.place(one) for one in matrix["sources"]]
        theirs = [destinations.place(one) for one in matrix["destinations"]]
        for cell in matrix["cells"]:
            place = ours[cell["from"]], theirs[cell["to"]]
            decided = {
                direction
                for direction, end in (
                    ("egress", matrix["sources"][cell["from"]]),
                    ("ingress", matrix["destinations"][cell["to"]]),
                )
                if end["here"] or not _is_pod(end)
            }
            cells.setdefault(place, _Cell()).add(cell, decided)
    shown = [sources.shown(), destinations.shown()]
    at = [{place: number for number, place in enumerate(one)} for one in shown]
    return {
        "sources": [sources.ends[one] for one in shown[0]],
        "destinations": [destinations.ends[one] for one in shown[1]],
        "more-sources": _more(answers, "more-sources", len(sources.ends) - len(shown[0])),
        "more-destinations": _more(answers, "more-destinations", len(destinations.ends) - len(shown[1])),
        "namespaces": sorted({name for one in answers.values() for name in one["namespaces"]}),
        "cells": [
            {"from": at[0][source], "to": at[1][target], **cell.shown()}
            for (source, target), cell in cells.items()
            if source in at[0] and target in at[1]
        ],
    }


def _more(answers: Mapping[str, Matrix], name: str, left: int) -> int:
    return left + max((one[name] for one in answers.values()), default=0)


def _is_pod(end: Mapping[str, Any]) -> bool:
    return bool(end["namespace"])


class _Ends:
    """Rows or columns: one for each identity, and for each network that selects its pods."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, end: Mapping[str, Any]) -> int:
        """Return the index of an end, and merge its pods of all nodes."""
        key = end["identity"], tuple(end.get("networks") or ())
        if key not in self._places:
            self._places[key] = len(self.ends)
            self.ends.append({**end, "pods": list(end["pods"])})
        else:
            known = self.ends[self._places[key]]
            known["pods"] = sorted({*known["pods"], *end["pods"]})
            if end["here"] and not known["here"]:
                known |= {"here": True, "ask": end["ask"]}
        return self._places[key]

    def shown(self) -> list[int]:
        """Return the indexes in order: reserved identities, then pods by namespace."""
        ranked = sorted(
            range(len(self.ends)),
            key=lambda at: (
                _is_pod(self.ends[at]),
                self.ends[at]["namespace"],
                self.ends[at]["pods"],
                self.ends[at]["labels"],
            ),
        )
        reserved = sum(not _is_pod(one) for one in self.ends)
        return ranked[: reserved + MOST_ENDS]


class _Cell:
    """The verdict for a source and destination, by the nodes that decide it."""

    def __init__(self) -> None:
        self._verdicts: dict[str, str] = {}
        """Verdict -> headline of the first node with it."""
        self._decided: set[str] = set()

    def add(self, cell: Mapping[str, Any], decided: set[str]) -> None:
        """Add a node's verdict, and the directions that it decides."""
        self._verdicts.setdefault(cell["verdict"], cell["headline"])
        self._decided |= decided

    def shown(self) -> dict[str, str]:
        """Return the combined verdict and its description."""
        worst = max(self._verdicts, key=_WORST.index)
        if worst == "elsewhere" and self._decided == {"egress", "ingress"}:
            return {"verdict": "allowed", "headline": "allowed by both ends"}
        return {"verdict": worst, "headline": self._verdicts[worst]}
