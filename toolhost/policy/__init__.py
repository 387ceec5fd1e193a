"""What a jail sees and may do: the plan that follows from what was looked up (toolhost/facts/). Pure."""
