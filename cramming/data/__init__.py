"""From a corpus folder to batches: shards (the on-disk format) and packed batches."""
