"""Endpoints on disk: the state directory, and what is in its files."""
