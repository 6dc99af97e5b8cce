"""Metrics of flows, as ``hubble-metrics`` asks for, on a port of their own."""
