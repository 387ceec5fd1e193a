"""Live configuration: patches of the running configuration, by extensions and by operators.

Source: docs/live-config.md; requirements CONFIG-01 to CONFIG-03.
"""
