"""What makes "accepted" true: every decision about a message is written here before it takes effect.

`state/records.py` has what is written, as plain values. `committer.py` writes batches of it. `store.py` has the SQLite
file with its checks at the start, `tables.py` its rows, `redo.py` what has not come into the tables yet, `files.py` the
files beside it.
"""
