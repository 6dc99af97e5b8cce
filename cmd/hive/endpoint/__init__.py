"""Endpoints of the running agent: listed, looked at, changed."""
