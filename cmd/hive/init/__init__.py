"""What prepares a node before the agent runs on it, and puts it back: the commands of init containers."""
