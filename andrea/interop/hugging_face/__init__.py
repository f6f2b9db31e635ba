"""Exports for Hugging Face transformers."""
