"""Root's powers: what a tool host gives up, and the links to those that keep what jails still take."""
