"""``hive debug bundle``: one archive with the data for a bug report.

It contains no secrets: settings are shown as by the agent; of its environment only its own variables, and no
file of the config-dir, are included; texts that look like keys, tokens or passwords are hidden.
"""

import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import click

from hive.client import ask, socket_option, timeout_option
from hive.redact import redacted_file

PATHS = {
    "agent/debuginfo": "/v1/debuginfo",
    "agent/healthz": "/v1/healthz",
    "agent/config": "/v1/config",
    "agent/settings": "/hive/config",
    "agent/endpoints": "/v1/endpoint",
    "agent/identities": "/v1/identity",
    "agent/prefixes": "/v1/ip",
    "agent/maps": "/v1/map",
    "agent/nodes": "/v1/cluster/nodes",
    "agent/metrics": "/v1/metrics/",
    "agent/tables": "/statedb/dump",
    "agent/graph": "/hive/graph",
    "agent/timeline": "/hive/timeline",
    "agent/loop": "/hive/loop",
}
FILES = (
    *("/proc/version", "/proc/cmdline", "/proc/meminfo", "/proc/cpuinfo", "/proc/mounts", "/etc/os-release"),
    *("/proc/net/dev", "/proc/net/route", "/proc/net/ipv6_route", "/proc/net/if_inet6", "/proc/net/arp"),
    *("/proc/net/softnet_stat", "/proc/net/sockstat", "/proc/sys/net/ipv4/ip_forward"),
    "/proc/sys/net/ipv6/conf/all/forwarding",
)
STDOUT = Path("-")
LOG_BYTES = 1 << 20
"""Maximum size of the plugin's log, from its end."""


@click.group()
def command() -> None:
    """Collect the data for a bug report."""


@command.command()
@click.option(
    "-f",
    "--file",
    "target",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The archive to write; - is standard output.",
)
@click.option(
    "--bpf-root",
    type=click.Path(path_type=Path, readable=False),
    default=Path("/sys/fs/bpf"),
    show_default=True,
)
@socket_option
@timeout_option
def bundle(target: Path | None, bpf_root: Path, agent_socket: Path, timeout: float) -> None:
    """Write one archive with the agent's state, its maps and the node's network; secrets are left out.

    Works without an agent, too. errors.txt and the last lines of output name parts that cannot be collected.
    """
    name = f"hive-debug-{platform.node()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    path = target or Path(f"{name}.tar.gz")
    errors: list[str] = []
    collected = 0
    with _written(path) as file, tarfile.open(fileobj=file, mode="w|gz") as archive:
        for what, make in _parts(agent_socket, bpf_root, timeout):
            try:
                text = make()
            except (click.ClickException, OSError, ValueError) as error:
                message = error.format_message() if isinstance(error, click.ClickException) else str(error)
                errors.append(f"{what}: {message}")
                continue
            _add(archive, f"{name}/{what}", redacted_file(what, text))
            collected += 1
        _add(archive, f"{name}/errors.txt", "".join(f"{line}\n" for line in errors).encode())
    click.echo(f"{path}: {collected} parts", err=path == STDOUT)
    for line in errors:
        click.echo(f"not collected: {line}", err=True)


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """Open the archive. Raises click.ClickException."""
    if path == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.ClickException(
            f"{path} cannot be written: {error.strerror}; choose another --file"
        ) from error
    with open(descriptor, "wb") as file:  # noqa: PTH123
        yield file


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _parts(agent_socket: Path, bpf_root: Path, timeout: float) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the names in the archive, with the functions that return their contents."""
    for name, path in PATHS.items():
        yield f"{name}.json", partial(_answer, path, agent_socket, timeout)
    yield "agent/endpoint-logs.json", partial(_endpoint_logs, agent_socket, timeout)
    yield "kernel/maps.json", partial(_maps, bpf_root)
    directory = bpf_root / "tc" / "globals"
    for pin in sorted(directory.iterdir()) if os.access(directory, os.R_OK | os.X_OK) else ():
        if pin.name.startswith(("cilium_", "hive_")) and pin.name not in _WITHOUT_ROWS:
            yield f"kernel/maps/{pin.name}.json", partial(_rows, pin)
    yield "node/network.json", _network
    for text in FILES:
        yield f"node{text}", Path(text).read_bytes
    yield from _state(agent_socket.parent)
    yield from _process(agent_socket.parent / "cilium.pid")
    yield "node/cni.txt", partial(_cni, agent_socket, timeout)


_WITHOUT_ROWS = {"cilium_events"}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _answer(path: str, agent_socket: Path, timeout: float) -> bytes:
    return _json(ask(path, agent_socket, timeout=timeout))


def _end(log: Path) -> bytes:
    return log.read_bytes()[-LOG_BYTES:]


def _endpoint_logs(agent_socket: Path, timeout: float) -> bytes:
    numbers = [one["id"] for one in ask("/v1/endpoint", agent_socket, timeout=timeout)]
    return _json({n: ask(f"/v1/endpoint/{n}/log", agent_socket, timeout=timeout) for n in numbers})


def _maps(bpf_root: Path) -> bytes:
    from hive.maps.bpf import summaries  # loads the maps cell

    return _json(summaries(bpf_root))


def _rows(pin: Path) -> bytes:
    from hive.maps.pinned import rows_of

    return _json(rows_of(pin))


def _network() -> bytes:
    from hive.agent.network_state import network_state  # loads pyroute2

    return _json(network_state())


def _process(pidfile: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Return the agent's use of resources and its log, without its command line."""
    try:
        process = Path("/proc", str(int(pidfile.read_text())))
    except (OSError, ValueError):
        return
    for name in ("status", "limits", "cgroup", "mountinfo"):
        yield f"process/{name}", (process / name).read_bytes
    yield "process/fd.txt", partial(_descriptors, process / "fd")
    yield "process/log.txt", partial(_log, process / "fd" / "2")


def _descriptors(directory: Path) -> bytes:
    descriptors = sorted(directory.iterdir(), key=lambda each: int(each.name))
    return "".join(f"{each.name} {each.readlink()}\n" for each in descriptors).encode()


def _log(standard_error: Path) -> bytes:
    """Return the end of the agent's log. Raises ValueError if another program stores it."""
    if not standard_error.is_file():
        raise ValueError("the agent's log is not a file: add it manually, from kubectl logs or journalctl")
    return _end(standard_error)


def _cni(agent_socket: Path, timeout: float) -> bytes:
    """Return the network configurations that a runtime finds (it uses the first), and the content of ours."""
    settings = ask("/hive/config", agent_socket, timeout=timeout)["settings"]
    ours = next(one["value"] for one in settings if one["name"] == "write-cni-conf-when-ready")
    if not ours:
        return b"write-cni-conf-when-ready is not set\n"
    names = "".join(f"{path}\n" for path in sorted(Path(ours).parent.iterdir()))
    return names.encode() + b"\n" + Path(ours).read_bytes()


def _state(state_dir: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Return names and contents of files in the state directory, and the plugin's log."""
    yield "state/listing.txt", partial(_listing, state_dir)
    for pattern in ("state/*/ep_config.json", "*.json", "cilium.pid"):
        for path in sorted(state_dir.glob(pattern)):
            yield f"state/{path.relative_to(state_dir)}", path.read_bytes
    log = state_dir / "cilium-cni.log"
    if log.exists():
        yield "state/cilium-cni.log", partial(_end, log)


def _listing(directory: Path) -> bytes:
    lines = []
    for path in sorted(directory.rglob("*")):
        found = path.lstat()
        lines.append(f"{found.st_mode:o} {found.st_uid}:{found.st_gid} {found.st_size:>9} {path}\n")
    return "".join(lines).encode()
