"""Normalisation and the quality filters."""
