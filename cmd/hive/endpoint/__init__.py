"""Endpoints of the running agent: list, show, change."""
