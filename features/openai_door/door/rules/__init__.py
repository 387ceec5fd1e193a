"""What OpenAI's requests ask of an agent, and its answers in OpenAI's words. Pure."""
