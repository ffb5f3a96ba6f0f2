"""Second readers of the source: none shares more than tables of names with what made the output."""
