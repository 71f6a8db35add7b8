"""What is trained on top of a network, and the files it is kept in."""
