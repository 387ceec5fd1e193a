"""What sandbox this host can give, and why it can give no better one.

tiers tries one kind of jail after the other, probe makes a jail and looks at its walls, diagnosis says what is in the
way and how to mend it. `python -m toolhost.survey` prints all of it.
"""
