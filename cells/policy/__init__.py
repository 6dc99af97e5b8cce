"""Policy: which peers an endpoint may talk to."""
