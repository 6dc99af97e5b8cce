"""The CNI configurations we write ourselves.

Needs: nothing.   Gives: TEMPLATES, Plugin, conflist.
Source: Cilium 1.17, the CNI configuration manager's templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

Plugin = dict[str, object]
"""One entry of ``plugins``."""

PORTMAP: Final[Plugin] = {"type": "portmap", "capabilities": {"portMappings": True}}
FLANNEL: Final[Plugin] = {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}}

TEMPLATES: Final[dict[str, tuple[str, Callable[[Plugin], list[Plugin]]]]] = {
    "none": ("cilium", lambda ours: [ours]),
    "portmap": ("portmap", lambda ours: [ours, PORTMAP]),
    "flannel": ("flannel", lambda ours: [FLANNEL, PORTMAP, ours]),
}
"""Chaining mode -> name of the network, and its plugins around ours. Other modes need a target."""


def conflist(mode: str, ours: Plugin) -> str:
    """Text of the configuration of a mode that has a template."""
    name, plugins = TEMPLATES[mode]
    if mode == "flannel":
        ours = {"type": ours["type"], "chaining-mode": mode, **ours}
    return json.dumps({"cniVersion": "0.3.1", "name": name, "plugins": plugins(ours)}, indent=2) + "\n"
