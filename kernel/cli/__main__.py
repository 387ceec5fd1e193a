"""`python -m goondan.kernel.cli`: the same as `gdn`."""

from goondan.kernel.cli import main

main()
