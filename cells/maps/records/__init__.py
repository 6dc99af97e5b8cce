"""What is inside the maps: a typed record for each key and value, whose bytes a test holds to the C."""
