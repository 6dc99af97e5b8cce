"""Kernel settings that other cells need, written and kept so.

Reconciler: reads the table ``sysctls``, which Sysctls fills with what cells ask for, and writes /proc/sys.
Needs:  nothing.   Gives: Sysctls.
Why:    a configuration tool that resets rp_filter or forwarding would silently cut pods off. The kernel
        reports changes of those two; everything is read again every 30 seconds.
"""

from cells.node.sysctl.files import SysctlFiles, sysctl_files
from cells.node.sysctl.sysctl import Sysctl, Sysctls
from lifecycle import module, provide, provide_private

__all__ = ["Sysctl", "SysctlFiles", "Sysctls", "cell", "sysctl_files"]

cell = module(
    "sysctl",
    "Kernel settings, restored when others change them",
    provide(Sysctls),
    provide_private(sysctl_files),
)
