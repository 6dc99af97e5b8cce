"""``hive ui``: who talks to which peer, who may, how nodes are, and how the agent started, on one page."""
