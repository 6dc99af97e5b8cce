"""The operator: what a cluster needs done once, not on every node. ``process`` composes it."""
