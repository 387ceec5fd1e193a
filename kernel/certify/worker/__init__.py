"""The certificate of a worker: it is started on a socket whose other end is a tool host that is played here.

Source: schemas/WORKER.md; docs/certify.md.
"""
