"""What the modules of tools export: found out by a worker in a jail, else read from their source."""
