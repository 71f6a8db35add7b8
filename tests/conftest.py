"""One torch thread per test process: the networks are tiny, and workers share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
