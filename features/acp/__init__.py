"""An agent of a swarm for editors: the Agent Client Protocol, version 1, on standard input and output (`gdn acp`).

Source: https://agentclientprotocol.com; docs/decisions/174-acp.md.
"""
