"""Prefect flows: they order tasks and hold settings."""
