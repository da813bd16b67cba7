"""Weights before the first step: one module for each start but random weights, loaded by name (run.py)."""
