"""What a jail sees and may do: what is looked up on this host, and the plan that follows from it."""
