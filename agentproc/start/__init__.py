"""How an agent process starts, and what is of the process: its log, and the watch of its loop."""
