"""Pure functions from plan to plan; each can be printed and tested before a byte moves."""
