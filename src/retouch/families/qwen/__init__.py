"""What the Qwen-Image families share."""
