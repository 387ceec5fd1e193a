"""What the broker decides about frames, events, calls and processes. Pure: no sockets, clock or files."""
