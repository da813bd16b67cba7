"""Scoring: fine-tune on GLUE (`eval.glue`), check the rules, render the report. Rules and report never import torch."""
