"""Pending hooks as a tree, which the error of an overdue hook shows."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lifecycle.hooks import hooks
from lifecycle.hooks.nodes import HookNode
from lifecycle.hooks.stacks import await_stack

__all__ = ["awaiting", "hook_stack", "pending_tree", "task_stack"]

MOST = 60
"""Maximum number of hooks shown; the others are counted."""

_inner: WeakKeyDictionary["asyncio.Task[object]", Callable[[], list[str]]] = WeakKeyDictionary()


def pending_tree(nodes: Iterable[HookNode]) -> list[str]:
    """Return the running hooks with what they await, and below each the hooks that wait for it.

    Each hook once.
    """
    pending = list(nodes)
    waiting: dict[HookNode, list[HookNode]] = {}
    for node in pending:
        for awaited in node.blocked_by:
            waiting.setdefault(awaited, []).append(node)
    lines: list[str] = []
    printed: set[HookNode] = set()
    # depth first without recursion: chains may be thousands deep
    stack: list[tuple[HookNode, HookNode | None, str, str]] = [
        (node, None, "", "") for node in reversed(pending) if node.running
    ]
    while stack and len(printed) < MOST:
        node, above, head, indent = stack.pop()
        if node in printed:
            continue
        printed.add(node)
        lines.append(head + _state(node, above))
        if node.running:
            lines += [f"{indent}    {line}" for line in hook_stack(node)]
        below = [waiter for waiter in waiting.get(node, ()) if waiter not in printed]
        for number, waiter in enumerate(reversed(below)):
            tail, deeper = ("└─ ", "   ") if number == 0 else ("├─ ", "│  ")
            stack.append((waiter, node, f"{indent}    {tail}", f"{indent}    {deeper}"))
    if more := len({node for node in pending if node.running or node.blocked_by} - printed):
        lines.append(f"and {more} more")
    return lines


def hook_stack(node: HookNode) -> list[str]:
    """Return the await stack of a hook, one line a frame; with the pending hooks of a hive that it runs."""
    return [] if node.task is None else task_stack(node.task, _OURS)


def task_stack(task: "asyncio.Task[Any]", below: frozenset[str]) -> list[str]:
    """Return the await stack of a task, for code called by the files `below`, and the lines of awaiting()."""
    lines = [f"in {frame}" for frame in await_stack(task, below=below)]
    return lines + (_inner[task]() if task in _inner else [])


@contextmanager
def awaiting(tree: Callable[[], list[str]]) -> Iterator[None]:
    """While this task waits for a hive or for jobs, `tree()` returns lines that show what those wait for."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # only called by coroutines
    before = _inner.get(task)
    _inner[task] = tree
    try:
        yield
    finally:
        if before is None:
            del _inner[task]
        else:
            _inner[task] = before


def _state(node: HookNode, above: HookNode | None) -> str:
    if above is None:
        return f"{node} has been {node.state.value} for {time.perf_counter() - node.began:.1f} s"
    others = [str(awaited) for awaited in node.blocked_by if awaited is not above]
    also = f", and for {', '.join(others[:3])}" if others else ""
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{node} waits for it{also}{more}"


# frames outside of the hook's code
_OURS = frozenset({hooks.__file__, str(Path(hooks.__file__).with_name("supervisor.py"))})
