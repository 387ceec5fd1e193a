"""Code that the bundled tools share. A jail of a bundled tool shows `toolhost/base`, so they import it as
`goondan_base`.

It imports only the standard library and `goondan_tool`. Modules that take long to import are imported at their first
use.
"""
