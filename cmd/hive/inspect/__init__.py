"""What a hive is made of, who needs whom, and how its start went."""
