"""Approvals: a person decides about calls of tools, and answers questions that are asked in the name of a call.

Source: docs/approvals.md.
"""
