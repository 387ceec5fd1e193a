"""What a turn decides and says, without sockets, clocks or files. Pure."""
