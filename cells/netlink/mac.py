"""MAC addresses: 6 bytes inside the agent, text at its edges."""

import os


def mac_text(mac: bytes) -> str:
    """Lower-case, colon separated text of a 6-byte MAC."""
    return mac.hex(":")


def parse_mac(text: str) -> bytes:
    """The 6 bytes of ``aa:bb:cc:dd:ee:ff``; ValueError names the text."""
    parts = text.split(":")
    if len(parts) != 6 or any(len(part) != 2 for part in parts):
        raise ValueError(f"{text!r} is not a MAC address: expected six hex pairs like 02:00:00:00:00:01")
    try:
        return bytes.fromhex("".join(parts))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a MAC address: expected six hex pairs like 02:00:00:00:00:01"
        ) from None


def random_mac() -> bytes:
    """A random locally administered unicast MAC: first byte = (b | 0x02) & 0xfe."""
    mac = os.urandom(6)
    return bytes(((mac[0] | 0x02) & 0xFE,)) + mac[1:]
