"""Tokens of stored features: positions of maps, and patch tokens, one by one."""
