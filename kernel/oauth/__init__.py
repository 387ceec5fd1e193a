"""The process that holds OAuth tokens: `python -m goondan.kernel.oauth`.

Each kernel has at most one. It starts when a token is first asked for. It is a peer of the broker on the control
socket: each order gets one answer. `authority.py` carries orders out. `protocol.py`, `metadata.py` and `grants.py` are
pure. `vault.py` has the files, `http.py` and `redirects.py` have the sockets.

Source: docs/oauth.md; docs/decisions/068.
"""
