"""Recorded frames, for every client in any language to replay. README.md describes the files."""
