"""The tables' browser: what the agent knows, as it is and as it changes.

Needs:  Tables, HealthTree, NodeAddresses.
Gives:  StateDB and CiliumTables, each as a part of the API.
"""
