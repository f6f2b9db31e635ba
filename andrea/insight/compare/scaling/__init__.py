"""Scaling laws: the loss as a function of model size and tokens, fitted to finished runs."""
