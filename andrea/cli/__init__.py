"""The command line: its commands, their configuration through Hydra, sweeps, help."""
