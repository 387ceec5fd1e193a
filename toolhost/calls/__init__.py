"""Calls, and the sessions of jails in which they run: which were taken on, what their handlers ask, and how each comes
to its one result. Pure.

A session is one jail and the calls in it, from the first that needs it until its last process is gone. `session.py` is
one of them; `machine.py` has all, and decides what follows from what has happened. toolhost/serving does what is
decided.
"""
