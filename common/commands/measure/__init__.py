"""The verbs that measure a configuration without training it."""
