"""Facts of the step rules without torch."""

from __future__ import annotations

from typing import Literal

StepRuleName = Literal["flow_sde", "dance_sde", "cps", "ddim"]

RULES_OF: dict[str, tuple[StepRuleName, ...]] = {"flow": ("flow_sde", "dance_sde", "cps"), "epsilon": ("ddim",)}
"""Step rules by what the network predicts; the first is the default."""

ENDS_WITHOUT_NOISE = frozenset({"cps", "ddim"})
"""Step rules whose last step is taken without noise: it has no density and is never trained. For ddim that is exact
where the final alpha_bar is 1; SD1.5 ends just below, and the little noise that eta would draw there is left out."""

NOISE_LEVEL = {"flow_sde": 0.9, "cps": 0.8}
"""Defaults: of Flow-GRPO for FLUX (arXiv 2505.05470), of CPS (arXiv 2509.05952)."""

ETA = {"dance_sde": 0.3, "ddim": 1.0}
"""Defaults: of DanceGRPO (arXiv 2505.07818), of DDPO (arXiv 2305.13301)."""
