"""``cilium-dbg bpf``: maps in the kernel."""
