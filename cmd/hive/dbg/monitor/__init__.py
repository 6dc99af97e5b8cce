"""``cilium-dbg monitor``: events in the lines of Cilium's monitor."""
