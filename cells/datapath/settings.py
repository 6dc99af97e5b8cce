"""Settings of the datapath.

Needs: nothing.   Gives: DatapathSettings.
"""

from pathlib import Path

from lifecycle import Duration, Settings, seconds

PACKAGED_OBJECTS = Path(__file__).resolve().parent / "objects"


class DatapathSettings(Settings, frozen=True):
    """Which programs run, and how long connection tracking remembers."""

    datapath_object: Path | None = None
    """Compiled datapath to load; unset: the one in the package."""

    bpf_ct_timeout_regular_tcp: Duration = seconds(8000)
    """Lifetime of a TCP connection without packets."""

    bpf_ct_timeout_regular_any: Duration = seconds(60)
    """Lifetime of any other flow without packets."""

    bpf_ct_timeout_regular_tcp_syn: Duration = seconds(60)
    """Lifetime of a TCP connection of which only SYNs were seen."""

    bpf_ct_timeout_regular_tcp_fin: Duration = seconds(10)
    """How long a TCP connection that both sides have ended is remembered."""

    def validate(self) -> None:
        """Refuse lifetimes conntrack cannot keep; raises ValueError with one line."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, Duration) and not 1 <= value < 1 << 31:
                name = field.replace("_", "-")
                raise ValueError(f"{name}={value}: expected whole seconds, from 1s to 596523h")
