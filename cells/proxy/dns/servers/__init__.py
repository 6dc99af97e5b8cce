"""Asking servers for pods: by UDP and TCP, in the pods' names or the node's."""
