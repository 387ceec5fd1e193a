# What a jail of a bundled tool shows as this package, for the type checker.
