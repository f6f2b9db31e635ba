"""How the loss depends on model size and tokens, fitted to finished runs."""
