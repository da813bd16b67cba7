"""Fine-tuning of one model on all tasks under one set of hyperparameters."""
