"""One picture by one reward: what `retouch reward score` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from retouch.imaging import open_image, read_mask, to_rgb
from retouch.rewards.client import RewardClient
from retouch.rewards.launch import resolve_urls, reward_token
from retouch.rewards.protocol import RewardItem, score_checked
from retouch.rewards.scorers import make_scorer
from retouch.types import Outcome, Score


def score_one(
    reward: str, image: Path, prompt: str, mask: Path | None, source: Path | None, url: str | None
) -> tuple[dict[str, Any], bool]:
    """Score here, or on a server -> (the outcome as JSON values, whether it failed).

    Raises:
        ImageProblem, ConfigError: unusable arguments.
    """
    item = RewardItem(
        id=0,
        prompt=prompt,
        image=np.asarray(to_rgb(open_image(image))),
        mask=np.asarray(read_mask(open_image(mask), str(mask))[0]) if mask else None,
        source=np.asarray(to_rgb(open_image(source))) if source else None,
    )
    outcome = _remote(reward, item, url) if url else _here(reward, item)
    if isinstance(outcome, Score):
        return {"value": outcome.value, "detail": dict(outcome.detail)}, False
    return {"error": {"code": outcome.code, "message": outcome.message, "retryable": outcome.retryable}}, True


def _here(reward: str, item: RewardItem) -> Outcome:
    scorer = make_scorer(reward)
    scorer.load("cpu")
    return score_checked(scorer, [item])[0]


def _remote(reward: str, item: RewardItem, url: str) -> Outcome:
    with RewardClient(resolve_urls(url, reward), [reward], token=reward_token()) as client:
        return client.score([item])[reward][0]
