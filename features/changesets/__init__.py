"""Changes of the bundle that agents make and commit (docs/changesets.md)."""
