"""Rows of the maps that the agent writes, in the words of Cilium's tools.

For:    those who show maps. Needs: their records. Gives: row_text().
Source: Cilium 1.17, the text of keys and values of cilium_lxc and cilium_ipcache.
"""

from cells.maps.records.ipcache import IpcacheKey, IpcacheValue
from cells.maps.records.lxc import LxcKey, LxcValue


def row_text(name: str, key: bytes, value: bytes | None) -> tuple[str, str]:
    """Key and value; the value is empty where there is none. Rows of other maps are hexadecimal."""
    if name == "cilium_lxc":
        return f"{LxcKey.unpack(key).ip}:0", "" if value is None else _lxc(LxcValue.unpack(value))
    if name == "cilium_ipcache":
        return str(IpcacheKey.unpack(key).network), "" if value is None else _ipcache(
            IpcacheValue.unpack(value)
        )
    return key.hex(), "" if value is None else value.hex()


def _lxc(row: LxcValue) -> str:
    if row.is_host:
        return "(localhost)"
    mac, node_mac = row.mac.hex(":").upper(), row.node_mac.hex(":").upper()
    return (
        f"id={row.endpoint_id:<5d} sec_id={row.identity:<5d} flags=0x{row.flags:04X} "
        f"ifindex={row.ifindex:<3d} mac={mac} nodemac={node_mac}"
    )


def _ipcache(row: IpcacheValue) -> str:
    flags = "skiptunnel" if row.flags & 1 else "<none>"
    return (
        f"identity={row.identity} encryptkey={row.encrypt_key} "
        f"tunnelendpoint={row.tunnel_endpoint}, flags={flags}"
    )
