"""Hubble: what the datapath, the proxies and the agent report, as flows with names."""
