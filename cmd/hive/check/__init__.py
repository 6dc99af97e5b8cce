"""``hive check``: connectivity tests of a cluster: checks, the probe in their pods, and their sites."""
