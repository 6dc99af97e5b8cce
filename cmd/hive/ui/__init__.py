"""``hive ui``: a page with flows, policy verdicts, the state of nodes, and the agent's modules and start."""
