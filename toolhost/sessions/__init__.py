"""Sessions: each is one jail and the calls in it, from the first that needs it until its last process is gone.

`session.py`, `pool.py` and `machine.py` decide and are pure; `sessions.py` performs. `live.py` is what the shell has of
one session beside its calls, `wording.py` what is said to workers and in the log.
"""
