"""Operations of incremental derived tables: each computes the changed rows. ReadTable creates the tables."""
