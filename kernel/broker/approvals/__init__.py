"""Calls that wait for a person, and what stands still meanwhile."""
