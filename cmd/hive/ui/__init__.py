"""``hive ui``: who talks to whom, who may, how nodes are, and how the agent started, on one page."""
