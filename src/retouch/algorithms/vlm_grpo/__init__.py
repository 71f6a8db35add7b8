"""Train the vision-language model in front of a frozen diffusion model: recipe, scoring, checkpoints, use."""
