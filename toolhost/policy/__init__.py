"""What a jail sees and may do: the facts of this host that are looked up, and the plan that follows from them."""
