"""What the tool host, its workers and the kernel say to each other about jails."""
