"""Jails, from their launch to the end of their last process."""
