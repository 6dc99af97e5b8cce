"""Remove the nodes of a demo, and check that nothing of them is left."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import click

from hive.lab import agent_process
from hive.lab.children import signals_blocked
from hive.lab.cluster import Cluster
from hive.lab.demo.transcript import Transcript
from hive.lab.kernel import BPFObjects, alive, bpf_objects, lab_links, machine_links
from hive.lab.namespaces import Namespaces, mounted_below
from hive.lab.node import Lab, destroy, processes

SETTLE_WITHIN = 30.0


def remove_node(
    lab: Lab, transcript: Transcript, kernels: Sequence[BPFObjects], machine: frozenset[str]
) -> None:
    """Stop the agent, remove the node, and check that it is removed; signals wait until then.

    ``kernels`` are the node's BPF objects seen earlier, ``machine`` the result of lab_links() before the
    demo.
    """
    transcript.step(
        "nothing left",
        "The node is taken down",
        "The agent ends on SIGTERM; then the namespaces go, and with them links, maps and programs.",
    )
    with signals_blocked():
        known = [*kernels, *_last_objects(lab)]
        if agent_process.running(lab) is not None:
            began = time.monotonic()
            ended = agent_process.terminate(lab)
            transcript.check(
                "the agent ends when asked", ended, f"{(time.monotonic() - began) * 1000:.0f} ms"
            )
        outside = lab.open_outside() if lab.exists else None
        destroy(lab)
        _verify(lab, transcript, outside)
        links = sorted(lab_links() - machine)
        transcript.check("no link of the lab is on this machine", not links, ", ".join(links) or "as before")
        _verify_objects(transcript, known)


@contextlib.contextmanager
def removed_afterwards(
    cluster: Cluster, transcript: Transcript, name: str, title: str, explained: str
) -> Iterator[None]:
    """Run a part of the demo in the block, then remove the nodes of its cluster, even after an error.

    Errors in the block are reported, not raised. ``name``, ``title`` and ``explained`` are of the last step.
    """
    with signals_blocked():
        cluster.remove(cluster.nodes())  # of a killed demo
    machine = lab_links()
    try:
        yield
    except click.ClickException as error:
        transcript.fail(error.format_message())
    except (OSError, RuntimeError, ValueError) as error:
        transcript.fail(f"{type(error).__name__}: {error}")
    finally:
        transcript.step(name, title, explained)
        with signals_blocked():
            cluster.remove(cluster.nodes())
            left = wait_empty(lambda: sorted(lab_links() - machine))
        transcript.check("no link of the lab is on this machine", not left, ", ".join(left) or "as before")
        folders = (cluster.network.directory, cluster.node(1).directory)
        there = [str(path) for path in folders if path.exists()]
        transcript.check("no namespace is held", not there, ", ".join(there) or "none")


def wait_empty(left: Callable[[], list[str]]) -> list[str]:
    """Return what is left after a grace period: the kernel frees namespaces and BPF objects late."""
    deadline = time.monotonic() + SETTLE_WITHIN
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _last_objects(lab: Lab) -> list[BPFObjects]:
    if not lab.exists:
        return []
    with contextlib.suppress(OSError), lab.open() as node:
        return [node.run(bpf_objects)]
    return []


def _verify(lab: Lab, transcript: Transcript, outside: Namespaces | None) -> None:
    left = wait_empty(lambda: [f"process {pid}" for pid in processes(lab)])
    transcript.check("no process is left", not left, ", ".join(left) or "none in its namespaces")
    left = [str(path) for path in mounted_below(lab.directory)]
    if lab.directory.exists():
        left.append(str(lab.directory))
    transcript.check(
        "no namespace is held, no mount is left", not left, ", ".join(left) or str(lab.directory)
    )
    if outside is not None:
        with outside:
            # The other end of the uplink disappears with the node's network namespace.
            left = wait_empty(lambda: sorted(outside.run(machine_links) - {"lo"}))
        transcript.check(
            "its network is removed", not left, ", ".join(left) or "the uplink's far end went with it"
        )


def _verify_objects(transcript: Transcript, kernels: Sequence[BPFObjects]) -> None:
    maps = frozenset[int]().union(*(kernel.map_ids for kernel in kernels))
    programs = frozenset[int]().union(*(kernel.program_ids for kernel in kernels))
    left = wait_empty(lambda: alive(maps, programs))
    transcript.check(
        "no map and no program is left",
        not left,
        ", ".join(left) or f"all {len(maps)} maps and {len(programs)} programs are removed",
    )
