"""Code mode: the model calls its tools from scripts, which run in jails (docs/code-mode.md)."""
