"""One picture by one reward: what `retouch reward score` and `probe` do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from retouch.config.errors import ConfigError
from retouch.imaging import open_image, read_mask, to_rgb
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.endpoints import resolve_urls
from retouch.rewards.devices import numbered, require
from retouch.rewards.protocol import RewardItem, is_local, score_checked
from retouch.rewards.scorers import make_scorer
from retouch.rewards.server.launch import reward_token
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
    reference: Path | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> tuple[dict[str, Any], bool]:
    """Score here, or on a server -> (the outcome as JSON values, whether it failed).

    Args:
        wait_s: how long a server may take to be there and ready.
        options, device: of the scorer, where it is loaded here.

    Raises:
        ImageProblem, ConfigError: unusable arguments, or no server.
    """
    item = item_of(image, prompt, mask, source, reference)
    with asking(reward, url, wait_s, options, device) as ask:
        (outcome,) = ask([item])
    if isinstance(outcome, Score):
        return {"value": outcome.value, "detail": dict(outcome.detail)}, False
    return {"error": {"code": outcome.code, "message": outcome.message, "retryable": outcome.retryable}}, True


def item_of(
    image: Path, prompt: str, mask: Path | None = None, source: Path | None = None, reference: Path | None = None
) -> RewardItem:
    """An item of files.

    Raises:
        ImageProblem: a picture or mask that cannot be used.
    """
    return RewardItem(
        id=0,
        prompt=prompt,
        image=np.asarray(to_rgb(open_image(image))),
        mask=np.asarray(read_mask(open_image(mask), str(mask))[0]) if mask else None,
        source=np.asarray(to_rgb(open_image(source))) if source else None,
        reference=np.asarray(to_rgb(open_image(reference))) if reference else None,
    )


@contextmanager
def asking(
    reward: str, url: str | None, wait_s: float, options: Mapping[str, Any] | None = None, device: str = "cpu"
) -> Iterator[Callable[[Sequence[RewardItem]], list[Outcome]]]:
    """What scores items by a reward: loaded here, or on a server.

    Args:
        options: of the scorer; `scorer` is its name where `reward` is another.
        device: of the scorer, as torch names it.

    Raises:
        ConfigError: no such scorer, option or server.
    """
    if url is None:
        given = dict(options or {})
        scorer = make_scorer(str(given.pop("scorer", reward)), given)
        require([numbered(device)], f"--device: given {device!r}")
        scorer.load(device)
        yield lambda items: score_checked(scorer, items)
        return
    if options or device != "cpu":
        given = "--options" if options else "--device"
        raise ConfigError(f"{given}: given beside --url, but the server has its own; start it with them, or drop --url")
    urls = resolve_urls(url, reward)
    with RewardClient(urls, [reward], token=reward_token()) as client:
        problems = client.wait_ready(wait_s, every_server=False) if wait_s else _silent(urls)
        if problems:
            raise ConfigError(
                f"--url: {'; '.join(problems)}; start a server with `retouch reward serve {reward}`, or give --wait "
                "SECONDS for one that is starting"
            )
        yield lambda items: client.score(items)[reward]


def _silent(urls: Sequence[str]) -> list[str]:
    """What is wrong with servers of which none answers, whatever the answer; asked once."""
    problems: list[str] = []
    for url in urls:
        try:
            httpx.get(f"{url}/livez", timeout=_ANSWER_S, trust_env=not is_local(url))
            return []
        except httpx.RequestError as error:
            problems.append(f"{url}: {type(error).__name__} {error}".strip())
    return problems
