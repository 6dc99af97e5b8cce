"""Hubble's API over gRPC: the server, its services, and the sockets they are served on."""
