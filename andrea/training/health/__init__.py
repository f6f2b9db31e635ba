"""Health checks: they detect the problems of a run and report them."""
