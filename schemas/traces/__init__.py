"""What is noted of turns, and where it is found again."""
