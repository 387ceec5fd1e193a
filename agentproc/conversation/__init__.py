"""The conversation of an instance: its file, the running turn's messages, and its pictures and PDFs."""
