"""How tables that follow from others key by key work out what changed; ReadTable makes the tables."""
