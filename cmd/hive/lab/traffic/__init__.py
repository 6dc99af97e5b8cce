"""Traffic between lab nodes and pods, and queries of their network state, for forked children.

Nothing is imported here: children load only what they need.
"""
