"""The seal of a run set, the list of its runs, and their time-stamps."""
