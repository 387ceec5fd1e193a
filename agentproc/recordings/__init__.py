"""Recording the turns of an agent instance, and answering them from a recording."""
