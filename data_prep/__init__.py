"""Text to token shards: sources, cleaning, deduplication, tokenizer, packing. Nothing here imports torch."""
