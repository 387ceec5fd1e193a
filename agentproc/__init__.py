"""The agent process: decides what a turn does next, and keeps its conversation. Handlers run in the tool host.

`python -m goondan.agentproc` is one agent instance. `python -m goondan.agentproc.start.forkserver` starts many of them
quickly.
"""
