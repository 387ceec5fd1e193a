"""Looks up what a plan is made from, as toolhost/policy is pure: this host, and the paths that concern one jail.

    this_host       bubblewrap, the interpreter, which parts of the system there are
    jail_request    one jail to be: its workdir and its grants without links, what in them is guarded
    folders         folders that a call or a spawn names, and what of them stays read-only
    hiding          what does not show

Source: docs/design/sandbox.md sections 1 and 2.
"""
