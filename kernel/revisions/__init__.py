"""Restarting a kernel that runs: in place as a whole, agent by agent, or by what a changed bundle affects."""
