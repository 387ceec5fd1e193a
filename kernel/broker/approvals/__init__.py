"""Calls that wait for a person, and the clocks that stand still meanwhile."""
