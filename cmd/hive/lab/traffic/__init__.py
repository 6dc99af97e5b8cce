"""Messages of children inside nodes and pods, and their questions about their namespace.

Nothing is imported here: children load only what they need.
"""
