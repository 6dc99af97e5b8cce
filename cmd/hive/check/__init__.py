"""``hive check``: does this cluster work? The checks, the program in their pods, the clusters they run at."""
