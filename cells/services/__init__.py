"""Services: what kube-proxy does, done in eBPF."""
