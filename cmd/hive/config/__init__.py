"""Settings: what can be set, what the running agent has, and the directory they are written to."""
