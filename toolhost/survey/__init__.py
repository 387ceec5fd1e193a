"""Finds out which sandbox this host can give, and why it can give no better one.

`tiers` makes one kind of jail after the other and checks its walls. It explains a failure and says how to mend it.
`python -m goondan.toolhost.survey` prints all of it.
"""
