"""Two hours of every metric, for the shell: ``metrics``, ``metrics/plot``, ``metrics/html``.

Source: asks all metrics every five minutes, told to Prometheus or not, and keeps 24 samples of each.
Needs:  Metrics, Jobs.   Gives: Member[Commands], of the shell.
Why:    to find out what an agent has been doing even if it was never scraped.
Source of names and layouts: Cilium 1.17, pkg/metrics; ``cilium-dbg metrics list`` of 1.18 is one of them.
"""

from cells.observe.samples.commands import metrics_commands
from cells.observe.samples.samples import Sampler, Samples
from lifecycle import module, provide, provide_private

__all__ = ["Sampler", "Samples", "cell"]

cell = module(
    "metrics-samples",
    "Two hours of every metric",
    provide_private(Sampler),
    provide(metrics_commands),
)
