"""``cilium-dbg node``, ``nodeid``, ``cgroups``, ``encrypt``, ``kvstore`` and ``post-uninstall-cleanup``.

Source: Cilium 1.17, cilium-dbg/cmd/{node,nodeid,cgroups,encrypt,kvstore,cleanup}*.go.
"""

import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import anyio
import anyio.to_thread
import click

from cells.encryption.ipsec.plan import node_of, spi_of
from cells.maps.bpf import BpfError
from cells.maps.records.cluster import NodeValue
from cells.netlink.xfrm import XfrmKernel
from hive.dbg.bpf.maps import GLOBALS, entries_of, missing
from hive.dbg.go_text import ENCRYPTION, Shape, aligned, model, output_option, printed, table
from hive.dbg.main import Group, root_only
from hive.dbg.requests import RequestFailedError, ask, ask_or_fail

_PODS: Final[Shape] = {"containers[]": {}, "ips[]": {}}


@click.group(cls=Group)
def node() -> None:
    """Manage cluster nodes"""


@node.command("list")
@output_option
def list_nodes(output: str) -> None:
    """List nodes"""
    nodes = _asked("GET /cluster/nodes").get("nodes-added")
    if output and nodes is not None:
        shape: Shape = {"secondary-addresses[]": {}}
        click.echo(printed(model(nodes, shape), output, "[cells.api.models.status:NodeElement]"))
    elif nodes:
        header = ("Name", "IPv4 Address", "Endpoint CIDR", "IPv6 Address", "Endpoint CIDR", "Source")
        click.echo(table(header, sorted(_node_row(one) for one in nodes)))


def _node_row(one: dict[str, Any]) -> list[str]:
    """Return the cells of a node's row."""
    primary = one.get("primary-address") or {}
    families = [primary.get(family) or {} for family in ("ipv4", "ipv6")]
    cells = [family.get(key, "") for family in families for key in ("ip", "alloc-range")]
    return [one.get("name", ""), *cells, one.get("source", "")]


def _asked(operation: str) -> Any:
    """Return what the agent answers, or print why it does not. Raises click.exceptions.Exit."""
    try:
        return ask(operation)
    except RequestFailedError as error:
        click.echo(str(error), err=True)
        raise click.exceptions.Exit(1) from error


@click.group(cls=Group)
def nodeid() -> None:
    """List node IDs and associated information"""


@nodeid.command("list")
@output_option
def list_node_ids(output: str) -> None:
    """List node IDs and their IP addresses"""
    found = ask_or_fail("Cannot get node IDs", "GET /node/ids")
    if output:
        click.echo(printed(model(found, {"ips[]": {}}), output, "[cells.api.models.node:NodeID]"))
        return
    lines = ["NODE ID\tIP ADDRESSES\tSPI"]
    for one in found:
        before = f"{one.get('id', 0):#x}"
        for address in one.get("ips") or ():
            lines.append(f"{before}\t{address}")
            before = ""
    click.echo(aligned("\n".join(lines)))


@click.group(cls=Group)
def cgroups() -> None:
    """Cgroup metadata"""


@cgroups.command("list")
@click.option("--no-headers", is_flag=True, help="Do not print headers")
@output_option
def list_cgroups(no_headers: bool, output: str) -> None:
    """Display cgroup metadata maintained by Cilium"""
    pods = _asked("GET /cgroup-dump-metadata").get("pod-metadatas")
    if output:
        click.echo(printed(model(pods, _PODS), output, "[cells.api.models.node:CgroupPod]"))
        return
    lines = [] if no_headers else ["POD NAME\tPOD NAMESPACE\tCGROUP IDS\t"]
    for pod in pods or ():
        before = f"{pod.get('name', '')}\t{pod.get('namespace', '')}"
        for one in pod.get("containers") or ():
            lines.append(f"{before}\t{one.get('cgroup-id', 0)}\t")
            before = "\t"
    click.echo(aligned("\n".join(lines)))


@click.group(cls=Group)
def encrypt() -> None:
    """Manage transparent encryption"""


@encrypt.command("status")
@output_option
def encrypt_status(output: str) -> None:
    """Display the current encryption state"""
    root_only("cilium-dbg encrypt status")
    failure = "Cannot get daemon encryption status"
    status = ask_or_fail(failure, "GET /healthz", end="", headers={"Brief": "false"})
    found = _encryption(status.get("encryption") or {})
    if found["mode"] == "IPsec" and not found.get("ipsec"):  # Cilium's agent leaves this to its clients
        try:
            found["ipsec"] = anyio.run(_ipsec)
        except OSError as error:
            raise click.ClickException(f"{error}\n") from error
    if output:
        click.echo(printed(model(found, ENCRYPTION), output, "cells.api.models.status:EncryptionStatus"))
        return
    lines = [f"Encryption: {found.get('mode', ''):<26}"]
    if (ipsec := found.get("ipsec")) is not None:
        lines.append(f"Decryption interface(s): {', '.join(ipsec.get('decrypt-interfaces') or ())}")
        lines.append(f"Keys in use: {ipsec.get('keys-in-use', 0):<26}")
        lines.append(f"Max Seq. Number: {ipsec.get('max-seq-number', '')}")
        errors = ipsec.get("xfrm-errors") or {}
        lines.append(f"Errors: {ipsec.get('error-count', 0):<26}")
        lines += [f"\t{name}: {count:<26}" for name, count in sorted(errors.items()) if count]
    for one in (found.get("wireguard") or {}).get("interfaces") or ():
        lines.append(f"Interface: {one.get('name', '')}")
        lines.append(f"\tPublic key: {one.get('public-key', '')}")
        lines.append(f"\tNumber of peers: {one.get('peer-count', 0)}")
    click.echo("\n".join(lines))


def _encryption(found: dict[str, Any]) -> dict[str, Any]:
    """Return what Cilium's client shows: neither messages nor the peers of WireGuard."""
    mode = found.get("mode")
    if mode == "IPsec":
        return {"mode": mode, **({"ipsec": found["ipsec"]} if found.get("ipsec") else {})}
    if mode == "Wireguard":
        keys = ("name", "peer-count", "public-key")
        links = (found.get("wireguard") or {}).get("interfaces") or ()
        shown = [{key: link[key] for key in keys if key in link} for link in links]
        return {"mode": mode, "wireguard": {"interfaces": shown}}
    return {"mode": "Disabled"}


_INGRESS: Final = 0xFFFFFFF2
XFRM_STATISTICS: Final = Path("/proc/net/xfrm_stat")
"""Documentation/networking/xfrm/xfrm_proc.rst"""


async def _ipsec() -> dict[str, Any]:
    """Return the kernel's IPsec state, as the API's IPsecStatus. Raises OSError."""
    kernel = XfrmKernel()
    keys = {(one.aead, one.auth, one.crypt) for one in await kernel.states()}
    sequence = await kernel.last_sequence()
    counts = dict(line.split() for line in XFRM_STATISTICS.read_text(encoding="ascii").splitlines())
    errors = {name: int(count) for name, count in counts.items() if int(count)}
    found = {
        "keys-in-use": len(keys),
        "max-seq-number": "N/A" if sequence is None else f"{sequence:#x}/0xffffffff",
        "error-count": sum(errors.values()),
        "xfrm-errors": errors,
    }
    shown: dict[str, Any] = {key: value for key, value in found.items() if value}
    return shown | {"decrypt-interfaces": sorted(await anyio.to_thread.run_sync(_decrypting))}


def _decrypting() -> list[str]:
    """Return the devices with a program that receives encrypted packets. Raises OSError.

    Either Cilium's separate program, or the program of native devices, as in our agent and in Cilium.
    """
    from pyroute2 import IPRoute
    from pyroute2 import NetlinkError as Refused

    found = []
    try:
        with IPRoute() as ip:
            for link in ip.get_links():
                filters = ip.get_filters(index=link["index"], parent=_INGRESS)
                options = [
                    one.get_attr("TCA_OPTIONS") for one in filters if one.get_attr("TCA_KIND") == "bpf"
                ]
                names = [str(one.get_attr("TCA_BPF_NAME") or "") for one in options if one]
                if any(name.startswith(("cil_from_network", "cil_from_netdev")) for name in names):
                    found.append(link.get_attr("IFLA_IFNAME"))
    except Refused as error:
        raise OSError(error.code, "list filters") from error
    return found


FLUSH_ALL: Final = (
    "Flushing all XFRM states and policies can lead to transient connectivity interruption and plain-text"
    " pod-to-pod traffic. Do you want to continue? [y/N] "
)
FLUSH_SOME: Final = (
    "Running this command will delete all XFRM states and/or policies. It will lead to transient connectivity"
    " disruption and plain-text pod-to-pod traffic. Do you want to continue? [y/N] "
)


@encrypt.command("flush")
@click.option("-f", "--force", is_flag=True, help="Skip confirmation")
@click.option(
    "--node-id",
    default="",
    help="Only delete states and policies with this node ID. Decimal or hexadecimal (0x) format",
)
@click.option(
    "--spi", type=click.IntRange(0, 15), default=0, help="Only delete states and policies with this SPI"
)
@click.option(
    "--stale", is_flag=True, help="Delete stale states and policies based on the current node ID map content"
)
def encrypt_flush(force: bool, node_id: str, spi: int, stale: bool) -> None:
    """Flushes the current IPsec state"""
    root_only("cilium-dbg encrypt flush")
    if stale and (node_id or spi):
        raise click.ClickException("--stale cannot be combined with other flags except for --force\n")
    number = _node_number(node_id) if node_id else None
    known = _known_nodes() if stale else None
    some = stale or spi or number is not None
    if not force and not _confirmed(FLUSH_SOME if some else FLUSH_ALL):
        return
    try:
        if not some:
            anyio.run(XfrmKernel().flush)
            click.echo("All XFRM states and policies have been deleted.")
            return
        deleted = anyio.run(_flush, spi, number, known)
    except OSError as error:
        raise click.ClickException(f"{error}\n") from error
    if stale and not any(deleted):
        click.echo("No stale XFRM states or policies found.")
        return
    for count, what in zip(deleted, ("states", "policies"), strict=True):
        click.echo(f"Deleted {count} XFRM {what}.")


def _confirmed(question: str) -> bool:
    """Ask on the terminal; no answer counts as no."""
    click.echo(question, nl=False)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _node_number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        wrong = f'strconv.ParseInt: parsing "{text}": invalid syntax'
        raise click.ClickException(f'Unable to parse node ID "{text}": {wrong}\n') from None


def _known_nodes() -> frozenset[int]:
    """Return the node ids in cilium_node_map_v2. Raises click.ClickException."""
    name = "cilium_node_map_v2"
    try:
        entries = entries_of(name, f"Unable to read {GLOBALS / name}")
    except BpfError as error:
        raise click.ClickException(f"Unable to open {GLOBALS / name}: {missing(name, error)}\n") from error
    return frozenset(NodeValue.unpack(value).id for _, value in entries)


async def _flush(spi: int, number: int | None, known: frozenset[int] | None) -> tuple[int, int]:
    """Delete states and policies of an SPI, a node or unknown nodes; return their number. Raises
    NetlinkError.
    """

    def selects(node: int, its_spi: int) -> bool:
        if known is not None:
            return bool(node) and node not in known
        return (not spi or its_spi == spi) and (number is None or node == number)

    kernel = XfrmKernel()
    states = [one for one in await kernel.states() if selects(node_of(one.mark), one.spi)]
    policies = [
        one
        for one in await kernel.policies()
        if one.mark is not None and selects(node_of(one.mark), spi_of(one))
    ]
    results = [*await kernel.delete_policies(policies), *await kernel.delete_states(states)]
    for error in results:
        if error is not None:
            raise error
    return len(states), len(policies)


@click.group(cls=Group)
def kvstore() -> None:
    """Direct access to the kvstore"""


def _without_store() -> NoReturn:
    """Raise click.ClickException: this command has no etcd client."""
    try:
        configuration: Any = ask("GET /config")
    except RequestFailedError as error:
        raise click.ClickException(f"Unable to retrieve cilium configuration: {error}") from error
    kind = ((configuration.get("status") or {}).get("kvstoreConfiguration") or {}).get("type", "")
    if kind:
        raise click.ClickException(f"{kind}: keys are read with the store's own client, such as etcdctl")
    raise click.ClickException(
        'Unable to setup kvstore: unknown key-value store type "". See cilium.link/err-kvstore for details'
    )


@kvstore.command("get")
@click.argument("key")
@click.option("--recursive", is_flag=True, help="Recursive lookup")
@output_option
def get_key(key: str, recursive: bool, output: str) -> None:
    """Retrieve a key"""
    del key, recursive, output
    _without_store()


@kvstore.command("set")
@click.argument("key")
@click.option("--key", "named")
@click.option("--value", default="")
def set_key(key: str, named: str, value: str) -> None:
    """Set a key and value"""
    del key, named, value
    _without_store()


@kvstore.command("delete")
@click.argument("key")
@click.option("--recursive", is_flag=True, help="Recursive lookup")
def delete_key(key: str, recursive: bool) -> None:
    """Delete a key"""
    del key, recursive
    _without_store()


@click.command("post-uninstall-cleanup")
@click.option("-f", "--force", is_flag=True, help="Skip confirmation")
@click.option("--all-state", is_flag=True, help="Remove all cilium state")
@click.option("--bpf-state", is_flag=True, help="Remove BPF state")
def cleanup(force: bool, all_state: bool, bpf_state: bool) -> None:
    """Remove system state installed by Cilium at runtime"""
    root_only("cilium-dbg post-uninstall-cleanup")
    chosen = ["--all-state"] if all_state else ["--bpf-state"] if bpf_state else []
    arguments = [
        "hive",
        "cleanup",
        *chosen,
        *(["--force"] if force or os.environ.get("CILIUM_FORCE") else []),
    ]
    os.execvp("hive", arguments)  # noqa: S606 - the same program under its other name


COMMANDS: Final = {
    "node": node,
    "nodeid": nodeid,
    "cgroups": cgroups,
    "encrypt": encrypt,
    "kvstore": kvstore,
    "post-uninstall-cleanup": cleanup,
}
