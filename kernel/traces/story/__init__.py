"""The story of turns, made of their notes: one turn, and the tree of turns of several agents. Pure."""
