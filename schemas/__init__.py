"""The contract of the Goondan kernel: frames, addresses, errors, launch specifications, the link.

Every process package imports this one; this one imports none of them (see PROTOCOL.md and WORKER.md).
"""
