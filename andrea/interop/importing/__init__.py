"""Checkpoints of other programs, read into ours. `import_model.py` is the command; `families.py` lists what can be read."""
