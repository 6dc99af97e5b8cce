"""How often ended connections are removed.

For:    ConntrackGC. Needs: nothing. Gives: ConntrackSettings.
"""

from lifecycle import Duration, Settings, seconds


class ConntrackSettings(Settings, frozen=True):
    """Settings of the conntrack cell."""

    conntrack_gc_interval: Duration = seconds(0)
    """Time between two passes over the conntrack maps; 0: 10s to 12h, by how much the last one removed."""

    conntrack_gc_max_interval: Duration = seconds(0)
    """The longest that an interval by itself may become; 0: 12h."""

    def validate(self) -> None:
        """Refuse times that cannot be waited for; raises ValueError with one line."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value < 0 or 0 < value < 1:
                raise ValueError(f"{field.replace('_', '-')}={value}: expected 0, or 1s and more")
