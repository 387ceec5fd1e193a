"""What servers of tools write, made safe to pass on. Pure. They are hostile: their words are bounded and cleaned here.

    lines       messages from lines of a server's standard output
    listing     what a server offers, as tools of ours
    results     what a call gives, and what goes wrong
    bounds      what of a value is let through

Source: docs/design/tools.md section 11.
"""
