"""``hive lab demo`` in parts: each shows something and checks what it claims.

Nothing is imported here: the command loads the parts that it plays.
"""
