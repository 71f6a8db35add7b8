"""Common parts of the training loops: session, rollouts, evaluation, memory."""
