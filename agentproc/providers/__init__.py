"""Model providers: one module a vendor behind the interface of base.py."""
