"""Run whole nodes on one machine, each in its own namespaces: for ``hive lab``, and for tests.

Nothing is imported here: ``hive lab`` subcommands load only what they need.
"""
