"""What a jail uses: what Linux counts of it (keeper.py), and what the watch looks for from outside.

Every host needs the watch for the disk, because Linux does not count what one jail has written in a folder. Hosts
without control groups need it for memory, too. `watch.py` is the thread that looks while calls run, and finds out which
jail has filled a file system. `jail_usage.py` holds what is known of one jail. `procfs.py` reads what /proc shows of
its processes, and ends those that nothing else ends.

Source: docs/design/sandbox.md sections 4 and 5; docs/decisions/029.
"""
