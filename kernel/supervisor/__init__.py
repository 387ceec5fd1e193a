"""The first process of a kernel: it starts and watches all others. `python -m goondan.kernel.supervisor` runs it."""
