"""The kernel: broker, supervisor, the loader of bundles, and the `gdn` commands."""
