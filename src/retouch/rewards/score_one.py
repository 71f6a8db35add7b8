"""One picture by one reward: what `retouch reward score` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from retouch.config.errors import ConfigError
from retouch.imaging import open_image, read_mask, to_rgb
from retouch.rewards.client import RewardClient
from retouch.rewards.launch import resolve_urls, reward_token
from retouch.rewards.protocol import LOOPBACK, RewardItem, score_checked
from retouch.rewards.scorers import make_scorer
from retouch.types import Outcome, Score

_ANSWER_S = 5.0
"""For an address that does not even refuse."""


def score_one(
    reward: str,
    image: Path,
    prompt: str,
    mask: Path | None,
    source: Path | None,
    url: str | None,
    wait_s: float = 0.0,
) -> tuple[dict[str, Any], bool]:
    """Score here, or on a server -> (the outcome as JSON values, whether it failed).

    Args:
        wait_s: how long a server may take to be there and ready.

    Raises:
        ImageProblem, ConfigError: unusable arguments, or no server.
    """
    item = RewardItem(
        id=0,
        prompt=prompt,
        image=np.asarray(to_rgb(open_image(image))),
        mask=np.asarray(read_mask(open_image(mask), str(mask))[0]) if mask else None,
        source=np.asarray(to_rgb(open_image(source))) if source else None,
    )
    outcome = _remote(reward, item, url, wait_s) if url else _here(reward, item)
    if isinstance(outcome, Score):
        return {"value": outcome.value, "detail": dict(outcome.detail)}, False
    return {"error": {"code": outcome.code, "message": outcome.message, "retryable": outcome.retryable}}, True


def _here(reward: str, item: RewardItem) -> Outcome:
    scorer = make_scorer(reward)
    scorer.load("cpu")
    return score_checked(scorer, [item])[0]


def _remote(reward: str, item: RewardItem, url: str, wait_s: float) -> Outcome:
    urls = resolve_urls(url, reward)
    with RewardClient(urls, [reward], token=reward_token()) as client:
        problems = client.wait_ready(wait_s, every_server=False) if wait_s else _silent(urls)
        if problems:
            raise ConfigError(
                f"--url: {'; '.join(problems)}; start a server with `retouch reward serve {reward}`, or give --wait "
                "SECONDS for one that is starting"
            )
        return client.score([item])[reward][0]


def _silent(urls: Sequence[str]) -> list[str]:
    """What is wrong with servers of which none answers, whatever the answer; asked once."""
    problems: list[str] = []
    for url in urls:
        try:
            local = urlsplit(url).hostname in LOOPBACK  # its traffic must not go to a proxy of the environment
            httpx.get(f"{url}/livez", timeout=_ANSWER_S, trust_env=not local)
            return []
        except httpx.RequestError as error:
            problems.append(f"{url}: {type(error).__name__} {error}".strip())
    return problems
