"""What these commands decide and word, without I/O. Pure."""
