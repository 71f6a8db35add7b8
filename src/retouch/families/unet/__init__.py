"""What the inpainting families on U-Nets share."""
