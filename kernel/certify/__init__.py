"""`gdn certify`: whether a program keeps the rules of the bus as a client, or those of the channel into a jail.

The program is started once for each scenario, beside a kernel or a tool host that is played here, good and hostile.
What goes to and fro is written down with its time (trace.py). Whether a rule held is decided from that alone.

Source: docs/certify.md; docs/design/tests.md section 7.
"""
