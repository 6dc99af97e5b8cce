"""What an operator sees: packet events, the monitor socket, metrics, health, controllers, start times."""
