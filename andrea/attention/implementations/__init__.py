"""The implementations of attention, one file each."""
