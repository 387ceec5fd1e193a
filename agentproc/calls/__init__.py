"""Tool calls: of a turn, over the bus or in this process, and what they ask."""
