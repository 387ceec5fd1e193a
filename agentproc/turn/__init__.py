"""One agent instance and its turns: from an event to its answer."""
