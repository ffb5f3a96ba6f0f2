"""Prefect tasks: each calls one library function and makes one artifact."""
