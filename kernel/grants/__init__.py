"""Requests, grants and powers: what a bundle asks for, what its tools get, whether a person has agreed to it. Pure.

A manifest requests. Tools of the bundle's own tree and of the bundled package get what they request; tools of other
packages get the defaults until the operator has accepted the request of exactly this code. The operator can widen,
agents can only narrow. What a bundle can do beyond its jails are its powers: kernel/bundle/rules/asked_powers.py reads
them, `powers` decides.
"""
