"""Calls: which were taken on, what their handlers ask, and how each comes to its one result, whatever jail it is in."""
