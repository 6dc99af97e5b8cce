"""Events of Hubble as lines of JSON in files."""
