"""Processes, devices, precision, optimizer steps, checkpoints. accelerate lives here and nowhere else."""

from retouch.engine.checkpoint import CheckpointError, Checkpoints
from retouch.engine.engine import Diverged, Engine, Launched, gather_list
from retouch.engine.policy import OutOfMemory, Policy

__all__ = ["CheckpointError", "Checkpoints", "Diverged", "Engine", "Launched", "OutOfMemory", "Policy", "gather_list"]
