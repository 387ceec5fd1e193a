"""What of a conversation a model is shown, so that each request fits into its context. Pure."""
