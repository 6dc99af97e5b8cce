"""How long an endpoint may be without its link.

Needs: nothing.   Gives: EndpointGCSettings.
"""

from lifecycle import Duration, Settings, minutes


class EndpointGCSettings(Settings, frozen=True):
    """How long an endpoint may be without its link."""

    endpoint_gc_interval: Duration = minutes(5)
    """Interval between checks for endpoints without a link; missing in two checks, they are removed. 0s:
    never."""

    def validate(self) -> None:
        """Refuse less than a second; raises ValueError with one line."""
        value = self.endpoint_gc_interval
        if value and value < 1:
            raise ValueError(f"endpoint-gc-interval={value}: expected 0s, or 1s and more")
