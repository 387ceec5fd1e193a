"""Scripts of code mode: the languages that they are written in, and their calls."""
