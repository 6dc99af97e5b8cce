"""Endpoints made right in kernel and state file: the queue of builds, and the recovery of failed ones."""
