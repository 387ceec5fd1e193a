"""Runs that are recorded, and repeated without a model and without tools (docs/replay.md)."""
