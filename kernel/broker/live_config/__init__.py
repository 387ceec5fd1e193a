"""Patches of the running configuration: who may make which, what is in force, and what was decided. Pure.

`operations` reads JSON Patch, `rules` has the table of who may patch what, `patches` the history, `service` the frames.

Source: docs/live-config.md; requirements CONFIG-01 to CONFIG-03.
"""
