"""What the calls do: attach a pod, on a link of ours or of another plugin's, check it, detach it."""
