"""Training of the networks of letters on rendered text, and the text."""
