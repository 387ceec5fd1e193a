"""What a jail sees and may do: the plan that follows from what was looked up (toolhost/lookup/), its limits, and its
system call filter. Pure.

The filter is compiled by us to classic BPF: `seccomp.py` says in names what a jail may do, and what three processes of
our own may do, and makes the bytes that `bwrap --seccomp FD` takes.

Source: docs/design/sandbox.md section 3.4; docs/decisions/021.
"""
