"""What happens to packets, while it happens."""
