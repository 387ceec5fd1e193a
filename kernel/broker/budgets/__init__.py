"""Budgets: what everything that one message set going may use, in all."""
