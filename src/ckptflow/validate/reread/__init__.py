"""Second readers of the source: none of them shares code with the readers and the engine that made the output."""
