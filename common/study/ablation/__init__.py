"""The worth of each method of a configuration, alone and together."""
