"""The Python API behind `andrea.load` and `andrea.train`. Users import these names from `andrea`."""
