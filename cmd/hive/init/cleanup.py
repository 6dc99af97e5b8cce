"""``hive cleanup``: removes the agent's state from a node, step by step.

Source: Cilium 1.17, cilium-dbg post-uninstall-cleanup: a failed step is reported, and the next one follows.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from hive.init import node_state

NAMED = 5
"""Maximum number of links that a warning names."""
Step = tuple[str, Callable[[], list[str]]]
"""A title, and a function that removes objects and returns their names."""


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The locations of the agent's state on this node."""

    state_dir: Path
    lib_dir: Path
    bpf_root: Path
    cgroup_root: Path
    cni_conf_dir: Path
    cni_conf_file: str


def _path(option: str, default: str, text: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(
        option, type=click.Path(path_type=Path, readable=False), default=default, show_default=True, help=text
    )


@click.command()
@click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--bpf-state",
    is_flag=True,
    help="Remove only programs and maps: pods have no policies until the next agent serves.",
)
@click.option("--all-state", is_flag=True, help="Remove everything, the default.")
@_path("--state-dir", "/var/run/cilium", "The agent's state-dir.")
@_path("--lib-dir", "/var/lib/cilium", "Library directory of an upstream Cilium agent.")
@_path("--bpf-root", "/sys/fs/bpf", "The agent's bpf-root.")
@_path("--cgroup-root", "/run/cilium/cgroupv2", "Where mount-cgroup mounted cgroup v2.")
@_path("--cni-conf-dir", "/etc/cni/net.d", "The container runtime's directory of CNI configurations.")
def command(
    force: bool,
    bpf_state: bool,
    all_state: bool,
    state_dir: Path,
    lib_dir: Path,
    bpf_root: Path,
    cgroup_root: Path,
    cni_conf_dir: Path,
) -> None:
    """Remove the agent's state from this node. Its pods lose their network.

    With --bpf-state pods keep it, but without policies until the next agent serves; a warning has their
    number. Refused while an agent runs. Failures are reported, and the remaining state is removed.
    """
    paths = StatePaths(
        state_dir,
        lib_dir,
        bpf_root,
        cgroup_root,
        cni_conf_dir,
        os.environ.get("WRITE_CNI_CONF_WHEN_READY", ""),
    )
    if os.geteuid() != 0:
        raise click.ClickException("cleanup needs root: links, programs and mounts are removed")
    if running(state_dir):
        raise click.ClickException(
            f"an agent runs with the state directory {state_dir}: stop it, then clean up"
        )
    everything = all_state or not bpf_state
    steps = [*link_steps(), *bpf_steps(paths), *state_steps(paths)] if everything else bpf_steps(paths)
    question = "Its pods lose their network. Go on?"
    if not everything:
        pods = node_state.pod_links()
        if pods:
            warn_of_open_pods(pods)
        question = "Go on?"
    if not force:
        click.echo("This removes from this node:")
        for title, _ in steps:
            click.echo(f"  {title}")
        if not click.confirm(question):
            click.echo("Nothing was removed.")
            return
    for title, remove in steps:
        run_step(title, remove)


def warn_of_open_pods(links: list[str]) -> None:
    """Warn on stderr, with --force too, that pods stay connected without policies, as with Cilium."""
    named = ", ".join(links[:NAMED]) + (", …" if len(links) > NAMED else "")
    pods = "1 pod keeps its link" if len(links) == 1 else f"{len(links)} pods keep their links"
    click.echo(
        f"Warning: {pods} ({named}) and no policy holds for them, in either direction, until the next\n"
        "agent serves. To remove the links first, and with them the pods' network: hive cleanup --all-state",
        err=True,
    )


def running(state_dir: Path) -> bool:
    """Whether an agent uses the state directory, by its lock: the pidfile may be stale."""
    with suppress(FileNotFoundError), (state_dir / "agent.lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run_step(title: str, remove: Callable[[], list[str]]) -> None:
    """Run a step, and print its result."""
    try:
        removed = remove()
    except node_state.NotRemovedError as error:
        click.echo(f"Error: {title}: {error}", err=True)
        removed = error.removed
    except OSError as error:
        click.echo(f"Error: {title}: {error}", err=True)
        return
    for name in removed:
        click.echo(f"removed {name}")


def link_steps() -> list[Step]:
    """Remove links. This precedes programs: a pod's link without a program would bypass its policy."""
    return [("links lxc* and cilium_*, with their routes", node_state.remove_links)]


def bpf_steps(paths: StatePaths) -> list[Step]:
    """Remove programs, then maps, so that no program runs with missing maps."""
    return [
        ("programs on interfaces", node_state.detach_programs),
        (f"pinned programs in {paths.bpf_root}", partial(node_state.remove_tree, paths.bpf_root / "cilium")),
        (
            f"pinned maps in {paths.bpf_root}",
            partial(node_state.remove_pins, paths.bpf_root / "tc" / "globals"),
        ),
    ]


def state_steps(paths: StatePaths) -> list[Step]:
    """Remove links with routes, mounts and files, and restore others' CNI configurations."""
    return [
        ("Envoy, which reads requests", partial(_end_envoy, paths.state_dir)),
        ("gobgpd, which announces routes", partial(_end_speakers, paths.state_dir)),
        ("rules for packets to the DNS proxy", node_state.remove_rules),
        ("network namespaces cilium-*", node_state.remove_namespaces),
        (f"cgroup v2 on {paths.cgroup_root}", partial(node_state.unmount, paths.cgroup_root)),
        (f"the state directory {paths.state_dir}", partial(node_state.remove_tree, paths.state_dir)),
        (f"the library directory {paths.lib_dir}", partial(node_state.remove_tree, paths.lib_dir)),
        (
            f"CNI configuration in {paths.cni_conf_dir}",
            partial(node_state.remove_cni_configuration, paths.cni_conf_dir, paths.cni_conf_file),
        ),
    ]


def _end_envoy(state_dir: Path) -> list[str]:
    from cells.proxy.envoy import end_envoy

    return end_envoy(state_dir)


def _end_speakers(state_dir: Path) -> list[str]:
    from cells.bgp.speaker_processes import end_speakers

    return end_speakers(state_dir)
