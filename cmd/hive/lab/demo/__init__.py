"""``hive lab demo``: the whole thing for a person to watch, in parts; what is claimed is checked at once.

Nothing is imported here: the command loads the parts that it plays.
"""
