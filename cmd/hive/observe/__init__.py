"""Live observation of packets and flows."""
