"""The system call filter of every jail, compiled by us to classic BPF: pure.

`rules.py` says what a jail may do and `own.py` what three processes of our own may do, in names; `numbers.py` knows the
names' numbers on each machine; `program.py` turns the one with the other into the bytes that `bwrap --seccomp FD`
takes.

Source: docs/design/sandbox.md section 3.4; docs/decisions/021.
"""
