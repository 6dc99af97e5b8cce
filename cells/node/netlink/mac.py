"""MAC addresses: 6 bytes inside the agent, text at its edges."""

import os
import re

_WITHOUT_SEPARATORS = str.maketrans("", "", ":-.")


def mac_text(mac: bytes) -> str:
    """Lower-case, colon separated text of a 6-byte MAC."""
    return mac.hex(":")


_FORMS = re.compile(
    r"[0-9a-f]{2}(:[0-9a-f]{2}){5}|[0-9a-f]{2}(-[0-9a-f]{2}){5}|[0-9a-f]{4}(\.[0-9a-f]{4}){2}", re.IGNORECASE
)


def parse_mac(text: str) -> bytes:
    """The 6 bytes of ``aa:bb:cc:dd:ee:ff``, ``aa-bb-…`` or ``aabb.ccdd.eeff``; ValueError names the text."""
    if not _FORMS.fullmatch(text):
        raise ValueError(f"{text!r} is not a MAC address: expected six hex pairs like 02:00:00:00:00:01")
    return bytes.fromhex(text.translate(_WITHOUT_SEPARATORS))


def random_mac() -> bytes:
    """A random locally administered unicast MAC: first byte = (b | 0x02) & 0xfe."""
    mac = os.urandom(6)
    return bytes(((mac[0] | 0x02) & 0xFE,)) + mac[1:]
