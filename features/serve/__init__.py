"""The door: a running swarm as an HTTP service, for whoever has a token.

Source: docs/design/features.md; docs/commands.md.
"""
