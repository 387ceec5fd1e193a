"""Patches of the running configuration: who may make which patch, and which patches are in force. Pure.

`operations` reads JSON Patch, `rules` has the table of who may patch what, `patches` the history, `service` the frames.

Source: docs/live-config.md; requirements CONFIG-01 to CONFIG-03.
"""
