"""The reward server."""
