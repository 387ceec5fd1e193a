"""What this process decides, without I/O. Pure."""
