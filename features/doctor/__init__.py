"""Looking at this machine: what the kernel needs of it, what is missing, and how to mend that.

Source: docs/design/commands.md section 7.
"""
