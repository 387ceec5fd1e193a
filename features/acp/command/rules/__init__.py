"""What `gdn acp` decides. Pure."""
