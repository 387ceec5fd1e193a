"""What the conformance package of the protocol finds. `make conformance` runs it; no test does."""
