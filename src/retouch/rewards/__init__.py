"""Rewards: scorers, the server that runs them, the client that asks, and how a run combines them."""
