"""Settings of the CNI configuration file, under Cilium's names.

Needs: nothing.   Gives: CniConfigSettings.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from lifecycle import Settings


class CniConfigSettings(Settings, frozen=True):
    """What is written for the container runtime, and where."""

    write_cni_conf_when_ready: str = ""
    """Path of the CNI configuration file, written once pods can be added; empty writes none."""

    cni_chaining_mode: str = "none"
    """How the plugin works with others; only none is there yet."""

    cni_log_file: str = "/var/run/cilium/cilium-cni.log"
    """File the plugin notes its troubles in, besides stderr."""

    def validate(self) -> None:
        """Refuse what is not there or cannot work; raises ValueError with one line."""
        if self.cni_chaining_mode.lower() not in {"", "none"}:
            raise ValueError(
                f"cni-chaining-mode={self.cni_chaining_mode}: chaining is not built yet (docs/status.md);"
                " expected none"
            )
        for name, value in (
            ("write-cni-conf-when-ready", self.write_cni_conf_when_ready),
            ("cni-log-file", self.cni_log_file),
        ):
            if value and not PurePosixPath(value).is_absolute():
                raise ValueError(f"{name}={value}: expected an absolute path, or nothing")
