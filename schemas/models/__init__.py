"""What is known of model servers: providers, windows, limits, and where a key may be sent."""
