"""What endpoints are in the kernel: their edges to it, their rows in maps, their claims in the ipcache."""
