"""The table of endpoints: its rows, their states, and what finds and changes them."""
