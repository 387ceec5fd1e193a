"""What is said on the wire: frames, payloads, errors, large payloads, and one end of a link.

Only msgspec and the standard library are imported here.
"""
