"""BPF maps: the kernel's content, and the agent's writes."""
