"""The parts of the API about the node: configuration, identities, prefixes, maps, nodes.

Needs:  Maps, Router, Device and what the node is made of.
Gives:  NodeStatus, ConfigOperations, NodeOperations.
"""
