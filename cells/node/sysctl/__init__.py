"""Kernel settings that other cells need, written and kept so.

Reconciler: reads the table ``sysctls``, which Sysctls fills with what cells ask for, and writes /proc/sys.
Needs:  nothing.   Gives: Sysctls.
Why:    a configuration tool that sets rp_filter or forwarding anew would cut pods off, in silence. The kernel
        tells of those two as they change; everything is read again every 30 seconds.
"""

from cells.node.sysctl.files import SysctlFiles, sysctl_files
from cells.node.sysctl.sysctl import Sysctl, Sysctls
from lifecycle import module, provide, provide_private

__all__ = ["Sysctl", "SysctlFiles", "Sysctls", "cell", "sysctl_files"]

cell = module(
    "sysctl", "Kernel settings, kept as they must be", provide(Sysctls), provide_private(sysctl_files)
)
