"""The maps: as the kernel has them, and as the agent writes them."""
