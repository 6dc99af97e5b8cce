"""What a hive is made of, what depends on what, and how its start went."""
