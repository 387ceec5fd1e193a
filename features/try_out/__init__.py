"""A tool or an extension to begin with, and a try of it (docs/tools.md, docs/extensions.md)."""
