"""Settings: their reference, the running agent's values, and the directory with their files."""
