"""Optimizers: parameter groups and a table of builders (build.py), and one file for each of the project's own."""
