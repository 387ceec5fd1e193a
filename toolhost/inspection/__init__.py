"""Finds out what the modules of tools export: a worker in a jail loads them, or their source is read."""
