"""Proof that an output directory is what its source says, by another path than the one that wrote it."""
