"""The container runtime's side: the CNI configuration it reads, and the server its plugin calls."""
