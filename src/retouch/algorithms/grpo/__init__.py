"""GRPO and PPO."""
