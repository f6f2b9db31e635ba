"""From text files to batches of tokens. Read the modules in this order: sources, download, tokenizer, prepare, shards,
corpus, loader."""
