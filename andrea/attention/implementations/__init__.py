"""Every way attention is computed, one file each."""
