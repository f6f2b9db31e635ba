"""The command line: its commands, sweeps, help, and errors as one line."""
