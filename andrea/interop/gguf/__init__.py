"""Exports for llama.cpp and the programs built on it: GGUF files."""
