"""The broker: `python -m goondan.kernel.broker`.

One process that routes frames between agents, tool hosts and clients. `loop.py` is the only module with sockets; all
the others are pure and decide: `router.py` looks at each frame, `events.py`, `tool_calls.py` and `processes.py` act
on it, over the state in `mailbox.py`, `calls.py` and `presence.py`.
"""
