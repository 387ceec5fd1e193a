# What the jail of code mode shows as this package, for the type checker.
