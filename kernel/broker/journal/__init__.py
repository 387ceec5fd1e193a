"""What makes "accepted" true: every decision about a message is written here before it takes effect.

- `interface.py`, `records.py`: what is written, as plain values. Pure.
- `store.py`: the SQLite file, its checks at the start, its retention.
- `mark.py`: the side file with what was promised.
- `reserve.py`: the space that is kept for the ends of events when the disk is full.
- `committer.py`: the thread that writes batches, so that the broker's loop never waits for a disk.
"""
