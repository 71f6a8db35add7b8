"""A vision-language model in front of a frozen diffusion network: its parts, its judge, its checkpoints, its use."""
