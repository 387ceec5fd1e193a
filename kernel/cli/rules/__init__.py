"""What commands read and show as text, without I/O. Pure."""
