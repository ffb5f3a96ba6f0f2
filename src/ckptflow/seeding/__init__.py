"""Model directories with fresh weights, made from a config: where training from scratch begins."""
