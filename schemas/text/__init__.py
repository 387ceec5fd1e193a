"""Texts that are shown, hidden or compared: what is visible, what is secret, what time it is. Pure."""
