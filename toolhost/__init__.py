"""The tool host: it runs tool handlers in jails and answers their calls on the bus.

`python -m toolhost --endpoint ipc://…/tools.sock --token-fd N`. It trusts nothing that comes out of a jail.
"""
