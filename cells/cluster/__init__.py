"""What a node knows of its cluster: whose every address is, which labels every identity stands for."""
