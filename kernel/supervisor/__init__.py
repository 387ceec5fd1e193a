"""The first process of a kernel: it starts and watches all others. `python -m kernel.supervisor` runs it."""
