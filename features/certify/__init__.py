"""Certificates: whether a program keeps the rules of the bus as a client, or those of the channel into a jail.

Source: docs/certify.md.
"""
