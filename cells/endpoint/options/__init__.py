"""What of endpoints can be set, and changed while the agent runs."""
