"""Rate limits of the API: who waits, for how long, and who is refused.

Needs:  nothing of the node.
Gives:  Limits, LimitSettings.
"""
