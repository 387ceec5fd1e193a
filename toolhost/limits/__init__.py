"""What a jail may use in all: memory, processes, processor time, disk, files.

`table.py` says which mechanism keeps which limit and `decide.py` when a limit is reached. Pure. What Linux counts of a
jail, and what is looked for beside it, is in toolhost/watch/.

Source: docs/design/sandbox.md sections 4 and 5; docs/decisions/029.
"""
