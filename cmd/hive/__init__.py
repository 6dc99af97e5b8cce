"""The ``hive`` command: runs the agent, looks into it, and gives it a laboratory node to run in."""
