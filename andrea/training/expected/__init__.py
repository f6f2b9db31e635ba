"""Validation figures that a recipe reached on a known text, shipped as `*.json`; bench/expected.py measures them."""
