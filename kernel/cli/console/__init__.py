"""What a person sees and types while a command talks to a swarm: its lines, its questions, its screen."""
