"""Configurations: YAML files, merged in a fixed order and checked to the last key."""
