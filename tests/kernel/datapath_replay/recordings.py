"""Reads recordings of Cilium's datapath programs, with given maps and packets: one JSON file each.

Each file in the folder is replayed, or excluded by a rule of rules.py; there is no list of names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from tests.support.recordings import recordings

FOLDER: Final = recordings("datapath")

Json = Any
"""A decoded recording, or a part of one."""

OK, SHOT, REDIRECT = 0, 2, 7
XDP_DROP, XDP_PASS, XDP_REDIRECT = 1, 2, 4
FIRST_DROP_REASON: Final = 130
DIRECTIONS: Final = {"ingress": 1, "egress": 2}

ETHERNET: Final = 14
IPV4: Final = b"\x08\x00"
IPV6: Final = b"\x86\xdd"
LIFETIME_AT, LAST_TX_AT, LAST_RX_AT = 32, 48, 52
"""Where a conntrack entry has its times."""


def raw(text: str) -> bytes:
    """Return the bytes of a key or value; times are zero."""
    return bytes.fromhex(text.replace("t", "0"))


@dataclass(frozen=True)
class Recording:
    """One packet, the state before it, and the result."""

    name: str
    data: Json

    @cached_property
    def area(self) -> str:
        """Return the part of the datapath that it tests."""
        return str(self.data["area"])

    @cached_property
    def hook(self) -> str:
        """Return where the program was attached: the first word of the recording's description."""
        return str(self.data["program"]["hook"].split()[0])

    @property
    def l3(self) -> bool:
        """Return whether its packet begins with the network header."""
        return str(self.data["program"]["packet_starts_at"]) == "ip header"

    @cached_property
    def switches(self) -> frozenset[str]:
        """Return the features that were compiled in."""
        return frozenset(each.partition("=")[0] for each in self.data["config"]["enabled"])

    @cached_property
    def constants(self) -> Json:
        """Return numbers and addresses, compiled in or set at load time."""
        return self.data["config"]["constants"] | self.data["config"]["load_time_constants"]

    @cached_property
    def packet(self) -> bytes:
        """Return the received packet."""
        return self.framed[ETHERNET:] if self.l3 else self.framed

    @cached_property
    def framed(self) -> bytes:
        """Return the received packet with an Ethernet header, added if it had none."""
        packet = bytes.fromhex(self.data["input"]["packet"])
        if self.l3:
            packet = bytes(12) + (IPV6 if packet[0] >> 4 == 6 else IPV4) + packet
        return self._complete(packet)

    @cached_property
    def mark(self) -> int:
        """Return the mark of the received packet."""
        return int((self.data["input"]["ctx"] or {"mark": "0"})["mark"], 16)

    @cached_property
    def verdict(self) -> int:
        """Return OK, SHOT or REDIRECT, whatever a replaced helper returned; for XDP, XDP_*."""
        if self.data["result"]["redirects"] and self.hook != "xdp":
            return REDIRECT
        return int(self.data["result"]["return_code"])

    @cached_property
    def dropped(self) -> bool:
        """Return whether the packet was dropped."""
        return self.verdict == (XDP_DROP if self.hook == "xdp" else SHOT)

    @cached_property
    def mark_after(self) -> int:
        """Return the resulting mark; on its way to a proxy by cilium_host, the control block's."""
        context = self.data["result"]["ctx"] or {"mark": "0"}
        return int(context["cb"][0] if self.goes_to_proxy else context["mark"], 16)

    @cached_property
    def goes_to_proxy(self) -> bool:
        """Return whether it is redirected to cilium_host: to-container does so only for a proxy."""
        return self.hook == "to-container" and self.verdict == REDIRECT

    @cached_property
    def packet_after(self) -> bytes:
        """Return the resulting packet, without the metadata word that an XDP program prepends."""
        packet = bytes.fromhex(self.data["result"]["packet"])
        if self.hook == "xdp" and self.verdict == XDP_PASS:
            packet = packet[-len(self.packet) :]
        return self._complete(packet)

    def _complete(self, packet: bytes) -> bytes:
        """Return the packet with its real length, which NAT steps lack and some packets exceed.

        Only IPv4's checksum covers it, of which only changes were recorded.
        """
        length = len(packet) - 14
        more = packet[12:14] == IPV4 and int.from_bytes(packet[16:18], "big") > length
        if self.hook == "snat-step" or more:
            return packet[:16] + length.to_bytes(2, "big") + packet[18:]
        if packet[12:14] == IPV6 and int.from_bytes(packet[18:20], "big") > length - 40:
            return packet[:18] + (length - 40).to_bytes(2, "big") + packet[20:]
        return packet

    @cached_property
    def tunnel_keys(self) -> list[Json]:
        """Return the tunnel keys that were set, in order."""
        return [each for each in self.data["result"]["tunnel_keys"] if each["call"] == "set_tunnel_key"]

    @cached_property
    def drop_reasons(self) -> set[tuple[int, int]]:
        """Return the reasons and directions of drops."""
        rows = self.data["result"]["metrics_delta"]
        reasons = {(int(row["reason"]), DIRECTIONS[row["direction"]]) for row in rows}
        return {(reason, way) for reason, way in reasons if reason >= FIRST_DROP_REASON}

    @cached_property
    def sent_by(self) -> int:
        """Return the index of the device it was redirected to, or of the receiving device."""
        return int((self.data["result"]["redirects"] or [{"ifindex": 1}])[-1]["ifindex"])

    def before(self, table: str) -> list[tuple[bytes, bytes, Json]]:
        """Return entries of a map: key, value, and the recorder's decoded fields."""
        rows = self.data["maps_before"].get(table, {"entries": []})["entries"]
        return [(raw(row["key"]), raw(row["value"]), row.get("decoded", {})) for row in rows]

    def after(self, table: str) -> dict[bytes, tuple[bytes, Json]]:
        """Return the map's entries after the run.

        Packets of L3 devices were recorded together with earlier ones of the other family.
        """
        rows = {key: (value, decoded) for key, value, decoded in self.before(table)}
        if self.l3 and ("6" if self.packet[0] >> 4 == 4 else "4") in table:
            return rows
        changes = self.data["result"]["map_changes"].get(table, {"added": [], "changed": [], "deleted": []})
        for row in changes["deleted"]:
            rows.pop(raw(row["key"]), None)
        for row in changes["added"]:
            rows[raw(row["key"])] = raw(row["value"]), row.get("decoded", {})
        for row in changes["changed"]:
            rows[raw(row["key"])] = raw(row["new"]["value"]), row["new"].get("decoded", {})
        return rows


def load_all() -> list[Recording]:
    """Load every recording of the folder, sorted by name."""
    return [Recording(path.stem, json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
