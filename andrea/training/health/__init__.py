"""Health checks: a run with a problem names it."""
