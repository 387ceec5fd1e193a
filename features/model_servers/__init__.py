"""Model servers of this machine: they are found, and offered to the person (docs/models.md)."""
