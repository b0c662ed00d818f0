"""Results beside the published ones."""
