"""What the FLUX.1 families share."""
