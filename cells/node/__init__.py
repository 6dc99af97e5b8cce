"""The node's own network: its devices, netlink, the router's device pair, and the host's addresses."""
