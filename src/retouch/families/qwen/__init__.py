"""Common code of the Qwen-Image families."""
