"""Loading and training of tokenizers."""
