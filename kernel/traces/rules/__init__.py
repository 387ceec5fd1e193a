"""What turns did, made of their notes: one turn, and the tree of turns of several agents. Pure."""
