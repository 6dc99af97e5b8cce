"""``hive operator``: runs the cluster's operator, and shows its status."""
