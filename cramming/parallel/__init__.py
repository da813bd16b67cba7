"""Several processes, and what is applied to the model from outside: checkpointing, compile, gradient exchange."""
