"""What a server says, as far as it is let through, and as ours. Pure."""
