"""The Python API: what `andrea.load` and `andrea.train` do. Users import these names from `andrea` itself."""
