"""OpenAI's doors: chat completions and responses. An agent is a model."""
