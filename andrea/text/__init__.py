"""From words to batches: sources (corpus), tokens (tokenizer), files of tokens (shards, prepare), batches (loader)."""
