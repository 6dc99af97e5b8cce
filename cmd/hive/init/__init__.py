"""What prepares a node before the agent runs on it, and what puts it back: the init containers' commands."""
