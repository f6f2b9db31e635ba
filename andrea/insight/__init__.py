"""What training left behind, made visible: one prompt head by head, many runs side by side."""
