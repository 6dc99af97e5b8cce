"""The tables' browser: what the agent knows, as it is and as it changes.

Needs:  Tables, HealthTree.
Gives:  StateDB and HealthTable, each as a part of the API.
"""
