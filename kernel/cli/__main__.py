"""`python -m kernel.cli`: the same as `gdn`."""

from kernel.cli import main

main()
