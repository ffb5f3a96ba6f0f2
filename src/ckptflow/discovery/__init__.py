"""Checkpoints on disk: which there are, which are complete or new, and where the model of each goes."""
