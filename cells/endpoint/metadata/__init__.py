"""What pods' and namespaces' objects say of endpoints: their labels."""
