"""Measurements: scripts that print what they found and fail nothing."""
