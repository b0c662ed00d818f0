"""A timed run and a run set: the loop, its log, its processes."""
