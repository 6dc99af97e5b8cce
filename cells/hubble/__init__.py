"""Hubble: what the datapath, the proxies and the agent report, as flows with names.

`flow` and `observer` define the messages of its API, `codec` writes and reads them.
"""
