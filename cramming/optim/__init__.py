"""Optimizers: parameter groups and a table of builders (build.py), LAMB and LARS (layerwise.py)."""
