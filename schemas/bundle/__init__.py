"""What a bundle may say, what becomes of it for a process, and how arguments are checked against it."""
