"""Who fills the disk: one walk over names and sizes, and the report made of it."""
