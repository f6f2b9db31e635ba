"""The command line: Hydra's border, sweeps, help."""
