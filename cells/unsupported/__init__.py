"""Cilium's options that this agent does not serve: refused, without effect, or of other programs.

Why:    a key of Cilium's ConfigMap is served, refused where it asks for what is not done, or known to change
        nothing. What remains is a mistake, and the agent warns of it.
"""

from cells.unsupported.refused import OTHERS, REFUSED, UnservedSettings, WithoutEffect
from cells.unsupported.without_effect import UNUSED, log_unused
from lifecycle import config, invoke, module

__all__ = ["OTHERS", "REFUSED", "UNUSED", "UnservedSettings", "WithoutEffect", "cell", "log_unused"]


cell = module(
    "unsupported",
    "Cilium's options that are not served",
    config(*REFUSED, *UNUSED),
    invoke(log_unused),
)
