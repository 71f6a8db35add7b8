"""The OCR engine is built once: a second of start-up, and it holds no state between calls (which is tested)."""

from __future__ import annotations

import logging

import pytest

from retouch.rewards.scorers.ocr import OcrReward, OcrScorer


@pytest.fixture(scope="session")
def line_ocr() -> OcrScorer:
    """Reads crops as one line."""
    scorer = OcrReward(detect=False, threads=1).make()
    scorer.load("cpu")
    return scorer


@pytest.fixture(scope="session")
def finding_ocr() -> OcrScorer:
    """Finds the lines first."""
    scorer = OcrReward(threads=1).make()
    scorer.load("cpu")
    return scorer


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of whoever runs the tests must not decide them."""
    monkeypatch.delenv("RETOUCH_REWARD_TOKEN", raising=False)


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Tests of secrets look at everything that is logged."""
    caplog.set_level(logging.DEBUG)
