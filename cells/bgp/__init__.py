"""BGP: this node's routes announced to the network by a speaker, a process of its own.

Why: pods and services are reached from outside without NAT where the network's routers know the way. The
     speaker is gobgpd: a restart of the agent touches no session, so it withdraws nothing.
"""
