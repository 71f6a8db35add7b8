"""Rewards scored in this process, behind the interface of the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from retouch.errors import ConfigError, RewardOutage, shown
from retouch.process.process_wide import loading
from retouch.rewards.base import problem_of
from retouch.rewards.protocol import CheckedScorer, RewardItem, Scorer, ScorerSpec
from retouch.types import Outcome

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""Seconds between two lines of the log about scorers that are still loading."""


class LocalRewards:
    """Scorers in one worker thread: the rollout continues while they score."""

    def __init__(self, scorers: Mapping[str, Scorer], device: str = "cpu") -> None:
        self.scorers = dict(scorers)
        self.device = device
        self._checked = {name: CheckedScorer(scorer) for name, scorer in scorers.items()}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self._loading = self._worker.submit(self._load)

    def submit(self, items: Sequence[RewardItem]) -> Future[dict[str, list[Outcome]]]:
        """Queue the items -> future of name -> one outcome per item."""
        return self._worker.submit(self._score, list(items))

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Wait for loading -> problems.

        Raises:
            Exception: the error of a scorer that failed to load.
        """
        try:
            self._loading.result(timeout_s)
        except TimeoutError:
            if self._loading.done():  # just in time, or the scorer itself raised TimeoutError
                self._loading.result()
                return []
            return [f"{', '.join(self.scorers)}: still loading after {timeout_s:.0f} s"]
        return []

    def settle(self) -> None:
        """Wait until loading has succeeded or failed."""
        while wait([self._loading], _PATIENCE_S).not_done:
            logger.info("%s: still loading", ", ".join(self.scorers))

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _load(self) -> None:
        for name, scorer in self.scorers.items():
            if not isinstance(getattr(scorer, "spec", None), ScorerSpec):
                raise ConfigError(
                    f"rewards.{name}: make of its entry returned {shown(scorer)}, which has no spec; return the "
                    "scorer, a subclass of PackageScorer"
                )
            try:
                with loading():
                    scorer.load(self.device)
            except (ConfigError, RewardOutage) as error:
                raise type(error)(problem_of(name, scorer, error)) from None

    def _score(self, items: list[RewardItem]) -> dict[str, list[Outcome]]:
        return {name: checked.score(items) for name, checked in self._checked.items()}
