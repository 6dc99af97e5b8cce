"""The commands of init containers: they prepare a node before the agent runs, and clean it up."""
