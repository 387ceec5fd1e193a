"""Jails with their calls: what toolhost/calls decides is done here.

`sessions.py` performs the decisions: with `starting.py`, which starts jails, `live.py`, which does what concerns one
jail alone, and `servers.py`, which does it for MCP servers. `answers.py` brings calls to their one result,
and takes what handlers ask to the bus and back.
"""
