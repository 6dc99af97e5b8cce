"""``hive service`` and ``hive bpf lb``: services by the agent, and by the kernel's maps."""
