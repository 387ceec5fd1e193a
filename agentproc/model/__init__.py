"""The calls of a model, and what of the conversation it is shown."""
