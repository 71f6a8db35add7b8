"""Scorers on the networks of letters."""
