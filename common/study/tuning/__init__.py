"""A search for settings that are faster and compute the same."""
