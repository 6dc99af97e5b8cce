"""What plugin and agent say to each other: packets on cni.sock, requests, results and errors of the CNI."""
