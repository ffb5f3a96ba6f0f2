"""One module per checkpoint layout; ``registry`` lists them and leads from a path to a checkpoint."""
