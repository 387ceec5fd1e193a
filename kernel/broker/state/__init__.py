"""What the broker holds: connections, instances, events, calls, places, and how the journal writes them. Pure."""
