"""Gradients of rewards through the decoder and single denoising steps."""
