"""What children inside nodes and pods say to each other, and what they ask of where they are.

Nothing is imported here: children load only what they need.
"""
