"""The page: a person looks at a swarm in a browser, and acts on it.

Source: docs/decisions/176.
"""
