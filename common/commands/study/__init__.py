"""The verbs that measure curves and predict."""
