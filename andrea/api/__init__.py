"""The Python API, and what the commands share with it: configurations from words of the form key=value, and training."""
