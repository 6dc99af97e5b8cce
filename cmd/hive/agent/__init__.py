"""The agent's process: run it, show its status, run commands in it, collect data for bug reports."""
