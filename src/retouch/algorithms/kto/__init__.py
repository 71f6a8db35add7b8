"""Kahneman-Tversky optimization on labelled images."""
