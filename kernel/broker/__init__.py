"""The broker: `python -m goondan.kernel.broker`.

One process that routes frames between agents, tool hosts and clients. `loop.py` is the only module with sockets
(`transport/`). `state/` is what the broker holds, and `routing/` what it decides: `router.py` looks at each frame,
`events.py`, `calls.py` and `processes.py` act on it. Both are pure. `journal/` keeps decisions on the disk.
"""
