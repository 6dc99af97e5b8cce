"""Which devices are the node's uplinks.

Needs: nothing.   Gives: DeviceSettings, matches().
"""

from __future__ import annotations

import re
from typing import Final

from lifecycle import Settings

ANY: Final = "+"
"""At the end of a name: any that begins so, as iptables has it."""
_NAME: Final = re.compile(r"[^\s/:+]{1,15}|[^\s/:+]{0,14}\+")
_SHOWN: Final = 32
"""Characters of a wrong name that an error shows."""


class DeviceSettings(Settings, frozen=True):
    """Which devices are the node's uplinks."""

    devices: tuple[str, ...] = ()
    """Devices through which packets leave the node; eth+ matches all names that start with eth; unset: every
    device that is up and has an address. They determine the node's address and the pods' MTU."""

    def validate(self) -> None:
        """Refuse what no device can be called (kernel: dev_valid_name in net/core/dev.c)."""
        wrong = [name for name in self.devices if not _NAME.fullmatch(name)]
        if wrong:
            shown = wrong[0] if len(wrong[0]) <= _SHOWN else f"{wrong[0][:_SHOWN]}..."
            raise ValueError(
                f"devices={','.join(self.devices)}: {shown} is no name of a device; expected names such as"
                " eth0, or eth+"
            )

    def selects(self, name: str) -> bool:
        """Whether a device of this name may be an uplink."""
        return not self.devices or any(matches(wanted, name) for wanted in self.devices)


def matches(wanted: str, name: str) -> bool:
    """Whether a device's name is the wanted one, or begins with what precedes its +."""
    return name.startswith(wanted.removesuffix(ANY)) if wanted.endswith(ANY) else name == wanted
