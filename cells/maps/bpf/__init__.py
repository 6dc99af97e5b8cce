"""bpf(2) for maps and programs: open, make, pin, read, write, run. Any map, of any system."""
