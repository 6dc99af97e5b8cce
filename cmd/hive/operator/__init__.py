"""``hive operator``: the operator of a cluster, and how it is."""
