"""The verbs of `ttt`: a module each, with `add_arguments` and `main`."""
