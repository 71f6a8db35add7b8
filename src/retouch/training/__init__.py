"""What every training loop stands on: session, rollouts, evaluation, memory."""
