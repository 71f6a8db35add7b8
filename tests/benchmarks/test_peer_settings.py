"""configs/reproduce beside the published settings."""

from __future__ import annotations

import json
import sys

import pytest

from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import peer_settings

FILES = sorted((REPOSITORY / "configs/reproduce").glob("*.yaml"))


def test_every_file_has_its_peer() -> None:
    assert {path.stem for path in FILES} == set(peer_settings.peers())


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.full if i else ()) for i, p in enumerate(FILES)]
)
def test_a_file_has_the_published_settings(path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forwards, trained steps, images and optimizer steps; and the committed result is current."""
    for name in peer_settings.VARIABLES:
        monkeypatch.setenv(name, "images")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or it waits where there is no network
    found = peer_settings.row(path)  # type: ignore[arg-type]
    assert found["differing"] == []
    committed = json.loads((REPOSITORY / "benchmarks/results/peer_settings.json").read_text(encoding="utf-8"))
    assert found in committed["rows"]


def test_a_difference_is_shown() -> None:
    ours = dict.fromkeys(peer_settings.COMPARED, 1) | {"device_gib": 2.0}
    entry = {"file": "one", "source": "there", "ours": ours, "peer": {**ours, "nfe_per_image": 3}}
    assert "1 (peer 3)" in peer_settings.table([entry])
