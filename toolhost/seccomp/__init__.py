"""The system call filter of every jail, compiled by us to classic BPF: pure.

`rules.py` says in names what a jail may do, and what three processes of our own may do. `program.py` knows the numbers
of the names on each machine, and makes the bytes that `bwrap --seccomp FD` takes.

Source: docs/design/sandbox.md section 3.4; docs/decisions/021.
"""
