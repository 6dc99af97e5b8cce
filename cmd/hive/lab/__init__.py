"""A laboratory: whole nodes in namespaces of their own on one machine, for people to watch and tests to use.

Nothing is imported here: ``hive lab`` subcommands load only what they need.
"""
