"""The certificate of a client: it is started beside a kernel that is played here.

Source: schemas/PROTOCOL.md; docs/certify.md.
"""
