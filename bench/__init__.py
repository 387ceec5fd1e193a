"""Benchmarks, each beside what it is compared with. `make bench`; never part of the tests."""
