"""Restarts of the kernel that agents wish, and conversations that begin again (docs/restart.md)."""
