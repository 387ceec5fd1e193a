"""`gdn doctor`: facts.py says what is looked at, look.py looks, findings.py judges.

Source: docs/design/commands.md section 7.
"""
