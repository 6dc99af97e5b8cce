"""How long an endpoint may be without its link.

Needs: nothing.   Gives: EndpointGCSettings.
"""

from lifecycle import Duration, Settings, minutes


class EndpointGCSettings(Settings, frozen=True):
    """How long an endpoint may be without its link."""

    endpoint_gc_interval: Duration = minutes(5)
    """An endpoint whose link is missing in two looks, so long apart, is removed; 0s: never."""

    def validate(self) -> None:
        """Refuse less than a second; raises ValueError with one line."""
        value = self.endpoint_gc_interval
        if value and value < 1:
            raise ValueError(f"endpoint-gc-interval={value}: expected 0s, or 1s and more")
