"""What turns did: their notes, conversations and logs, found in the state and read."""
