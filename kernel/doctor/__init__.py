"""`gdn doctor`: facts.py says what is looked at, look.py looks, findings.py judges.

Source: design section 11.
"""
