"""Settings of the announcement of services' addresses on the local network, under Cilium's names.

Gives: AnnouncementSettings.
"""

from __future__ import annotations

from collections.abc import Iterator

from lifecycle import Duration, Settings, refuse, seconds

JITTER = 1.2
"""How much longer than the period a retry may take."""


class AnnouncementSettings(Settings, frozen=True):
    """Which node answers for addresses of services, and for how long it may be silent."""

    enable_l2_announcements: bool = False
    """Answer ARP for addresses of services that CiliumL2AnnouncementPolicies select; one node answers for
    each service."""

    l2_announcements_lease_duration: Duration = seconds(15)
    """How long others wait for a node that does not renew its lease; as long it answers without its agent."""

    l2_announcements_renew_deadline: Duration = seconds(5)
    """How long a node keeps answering for a service after it fails to renew its lease."""

    l2_announcements_retry_period: Duration = seconds(2)
    """How often each lease is renewed, or tried for."""

    agent_liveness_update_interval: Duration = seconds(1)
    """How often the agent renews the time stamp by which programs know that it is alive."""

    def validate(self) -> None:
        """Refuse durations that do not fit; raises ValueErrors of one line."""
        refuse(self._wrong())

    @property
    def liveness(self) -> int:
        """Milliseconds for which the programs answer without a living agent; 0 for never."""
        return int(self.l2_announcements_lease_duration * 1000) if self.enable_l2_announcements else 0

    def _wrong(self) -> Iterator[str]:
        lease, renew, retry, alive = (
            self.l2_announcements_lease_duration,
            self.l2_announcements_renew_deadline,
            self.l2_announcements_retry_period,
            self.agent_liveness_update_interval,
        )
        if retry <= 0:
            yield f"l2-announcements-retry-period={retry}: expected more than 0"
        if not 1 <= lease <= 1 << 22:
            yield f"l2-announcements-lease-duration={lease}: expected at least 1s, at most 48 days"
        if lease <= renew:
            yield (
                f"l2-announcements-lease-duration={lease}: expected more than"
                f" l2-announcements-renew-deadline={renew}"
            )
        if renew <= JITTER * retry:
            yield (
                f"l2-announcements-renew-deadline={renew}: expected more than {JITTER} times"
                f" l2-announcements-retry-period={retry}"
            )
        if not 0 < alive < lease:
            yield (
                f"agent-liveness-update-interval={alive}: expected more than 0, and less than"
                f" l2-announcements-lease-duration={lease}"
            )
