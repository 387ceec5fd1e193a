"""Finds out which sandbox this host can give, and why it can give no better one.

`tiers` tries one kind of jail after the other. `probe` makes a jail and checks its walls. `diagnosis` explains a
failure and says how to mend it. `python -m goondan.toolhost.survey` prints all of it.
"""
