"""MLPerf's submissions: the official checkers, and a package that they accept."""
