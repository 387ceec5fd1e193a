"""What the door decides about a caller and a request. Pure."""
