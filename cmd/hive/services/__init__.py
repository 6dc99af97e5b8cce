"""``hive service`` and ``hive bpf lb``: services as the agent serves them, and as the maps have them."""
