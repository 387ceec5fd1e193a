"""Sessions: each is one jail and the calls in it, from the first that needs it until its last process is gone.

`session.py`, `pool.py` and `machine.py` decide, and are pure. `sessions.py` performs what they decide: with
`starting.py`, which starts jails, and `live.py`, which does what concerns one jail alone.
"""
