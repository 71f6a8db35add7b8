"""Training algorithms: a room for each."""
