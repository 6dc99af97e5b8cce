"""Which kernel the agent needs, and what goes missing on one that is not new.

Needs: the kernel's release.   Gives: check_kernel(), missing_features().
Source: the kernel's own history; what of it the programs and the agent use is named with each version.
"""

import re
from pathlib import Path
from typing import Final

from lifecycle import HiveError

Version = tuple[int, int]

OLDEST: Final[Version] = (5, 14)
"""SO_NETNS_COOKIE, which distinguishes pods' namespaces.

Before that: batches on LPM tries 5.13, bpf_ktime_get_coarse_ns and BPF memory that no RLIMIT_MEMLOCK limits
5.11, bpf_redirect_peer 5.10, fields of maps read by programs 5.9.
"""
BTF: Final = Path("/sys/kernel/btf/vmlinux")
"""The kernel's description of its types (CONFIG_DEBUG_INFO_BTF): conntrack maps are walked by it."""
LOCKDOWN: Final = Path("/sys/kernel/security/lockdown")
"""How far the kernel keeps root out of itself: ``none [integrity] confidentiality``."""
FEATURES: Final[tuple[tuple[Version, str], ...]] = (
    ((6, 8), "a pod's first packet to the node may be late by up to a second"),
)
"""What goes missing before each version."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


def version_of(release: str) -> Version | None:
    """Major and minor number in a release as uname tells it, such as ``6.1.0-18-amd64``."""
    found = _RELEASE.match(release)
    return (int(found[1]), int(found[2])) if found else None


def check_kernel(release: str) -> None:
    """Raise HiveError, one line, for a kernel that is too old; one that does not say what it is passes."""
    version = version_of(release)
    if version is not None and version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise HiveError(
            f"Linux {release} is too old: the agent needs {oldest} or later, which tells the network"
            " namespaces of pods apart; start a newer kernel"
        )


def missing_features(release: str, btf: Path = BTF, lockdown: Path = LOCKDOWN) -> list[str]:
    """What does not work on this kernel, each with what it takes."""
    version = version_of(release)
    missing = [
        f"{what}; it takes Linux {'.'.join(map(str, since))}"
        for since, what in FEATURES
        if version is not None and version < since
    ]
    stay = "ended connections, and those of removed pods, stay in the conntrack maps until these are full"
    if not btf.exists():
        missing.append(f"{stay}; it takes a kernel with CONFIG_DEBUG_INFO_BTF")
    if lockdown.exists() and "[confidentiality]" in lockdown.read_text():
        missing.append(f"{stay}; it takes a kernel without lockdown=confidentiality")
    return missing
