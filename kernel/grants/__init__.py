"""Requests and grants: what a tool asks for, what it gets, and who decides.

A manifest requests. Tools of the bundle's own tree and of the bundled package get what they request; tools of other
packages get the defaults until the operator has accepted the request of exactly this code. The operator can widen,
agents can only narrow. `merge` is pure; `policy_file` reads and writes files.
"""
