"""The server `python -m andrea serve`: OpenAI's HTTP interface for a checkpoint. A request is checked by `requests`, its
texts are written by `worker`, `answers` gives them OpenAI's form, and `app` and `server` connect all of it."""
