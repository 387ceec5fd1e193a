"""The process that holds OAuth tokens: `python -m kernel.oauth`.

There is one for each kernel, and none before a token is asked for. It is a peer of the broker on the control socket: an
order comes in, one answer goes out. `authority.py` carries orders out; `protocol.py`, `metadata.py` and `grants.py`
are pure; `vault.py` has the files, `http.py` and `redirects.py` the sockets.

Source: docs/oauth.md; docs/decisions/068.
"""
