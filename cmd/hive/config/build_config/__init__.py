"""``hive build-config``: builds the configuration directory from several sources, in an init container."""
