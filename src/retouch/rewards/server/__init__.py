"""The reward server."""

FINISH_S = 30
"""Seconds for open requests once a server is to end."""
