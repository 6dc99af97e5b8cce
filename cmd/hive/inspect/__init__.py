"""``hive inspect``: the dependency graph of a hive, and the timing of its start."""
