"""What models have used, and what it cost (docs/usage.md)."""
