"""Text to batches: sources (and download), tokenizer, prepare, shards, corpus, loader, in this order."""
