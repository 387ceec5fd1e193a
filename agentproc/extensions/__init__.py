"""Extensions of an agent: trusted code that runs in the agent's process, around its turns, steps and tool calls."""
