"""Namespaces for tests: a node of its own for one block, or for one whole test function.

Example::

    def test_maps_are_pinned(in_node: None) -> None:        # sync or async, the whole test runs in the node
        ...

    with node_namespace() as node:                          # several steps, the test itself stays outside
        node.run(create_the_maps)                           # forked child; result and exception come back
        assert node.run(list_the_pins) == [...]

    pod = new_netns()                                       # inside or outside a node; pod.net is the fd
    with inside(pod): ...                                   # this thread's sockets are the pod's
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from cells.datapath.build import OBJECTS, are_current
from hive.lab.children import Child, ChildDiedError, Stop, run_child
from hive.lab.namespaces import Namespaces, inside, new_netns, new_node

__all__ = [
    "Child",
    "ChildDiedError",
    "Namespaces",
    "Stop",
    "in_forked_node",
    "in_node",
    "inside",
    "need_root",
    "new_netns",
    "new_node",
    "node_namespace",
    "run_child",
]


def need_root() -> None:
    """Fail the test without root: what a kernel or node test covers is never left unchecked."""
    if os.geteuid() != 0:
        pytest.fail("needs root for namespaces and BPF: run it as root, or only make unit", pytrace=False)
    if not _objects_are_current():
        pytest.fail("eBPF objects and their sources differ: make install", pytrace=False)


@functools.cache
def _objects_are_current() -> bool:
    """Fail if the objects have other sources: a test would pass or fail for old programs."""
    return are_current(OBJECTS)


@contextmanager
def node_namespace() -> Iterator[Namespaces]:
    """Create a node: new network and mount namespaces, ``lo`` up, a bpffs at /sys/fs/bpf, an empty
    /run/cilium.

    The caller stays outside. Everything inside is removed with the block.
    """
    need_root()
    with new_node() as node:
        yield node


@pytest.fixture
def in_node(request: pytest.FixtureRequest) -> None:
    """Run the test function in a forked child inside a node of its own; failures propagate.

    Other fixtures run outside, before the fork: use them for values, not for sockets or namespaces.
    """
    need_root()
    item = request.node
    item.obj = in_forked_node(item.obj)


def in_forked_node(test: Callable[..., Any]) -> Callable[..., None]:
    """Return the test function, sync or async, wrapped to run in a forked child inside a new node."""

    @functools.wraps(test)
    def call(**arguments: Any) -> None:
        bound = functools.partial(test, **arguments)
        with new_node() as node:
            node.run(functools.partial(anyio.run, bound) if inspect.iscoroutinefunction(test) else bound)

    # pytest and anyio's plugin look through __wrapped__ for the kind of function this is.
    del call.__wrapped__
    return call
