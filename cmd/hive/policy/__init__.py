"""Policies, and the identities that they select."""
