"""What a jail may use in all: memory, processes, processor time, disk, files.

`plan.py` says which kernel mechanism keeps which limit, `decide.py` when a limit is reached: these are
pure. `groups.py` is control groups, `look.py` what /proc shows of a jail, `growth.py` what a folder has grown by, and
`watch.py` the thread that looks while calls run.

Source: docs/design/sandbox.md sections 1 and 4; docs/decisions/028 and 029.
"""
