"""Budgets: how much all work that began with one event may use in total."""
