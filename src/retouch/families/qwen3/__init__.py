"""What the families on a Qwen3 text encoder share."""
