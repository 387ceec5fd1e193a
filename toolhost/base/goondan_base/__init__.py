"""What the bundled tools share. A jail of a bundled tool shows `toolhost/base`, so they import it as `goondan_base`.

It imports the standard library and `goondan_tool` only, and what costs time only at its first use.
"""
