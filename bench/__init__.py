"""Benchmarks. Each is measured beside a baseline. `make bench` runs them; they are never part of the tests."""
