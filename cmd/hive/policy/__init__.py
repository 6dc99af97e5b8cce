"""Policies, and the identities they are about."""
