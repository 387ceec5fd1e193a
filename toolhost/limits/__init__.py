"""What a jail may use in all: memory, processes, processor time, disk, files.

`table.py` says which mechanism keeps which limit and `decide.py` when a limit is reached: these are pure.
`keeper.py` is what the kernel does for the limits of one jail. What it does not count the watch looks for
(toolhost/watch/).

Source: docs/design/sandbox.md sections 4 and 5; docs/decisions/029.
"""
