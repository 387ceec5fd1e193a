"""The watch: what is looked for from outside where the kernel does not count (limits/keeper.py).

Every host needs it for the disk, as no kernel counts what one jail has written in a folder. Hosts without control
groups need it for memory, too. `watch.py` is the thread that looks while calls run, `jail_usage.py` what is known of
one jail, `procfs.py` what /proc shows of its processes, `in_flight.py` what it can hide in sockets. `disks.py` and
`growth.py` find out which jail has filled a file system.

Source: docs/design/sandbox.md section 4; docs/decisions/028, 029 and 081.
"""
