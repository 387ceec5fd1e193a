"""Changesets: proposals of agents to change the bundle that they run in, as commits of the bundle's own repository."""
