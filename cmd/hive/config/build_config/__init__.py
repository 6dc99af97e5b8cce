"""``hive build-config``: one configuration directory out of several sources; an init container's command."""
