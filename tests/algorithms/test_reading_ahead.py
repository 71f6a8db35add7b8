"""Pictures of the next step are read by other threads, and nothing else is different."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.config import RunConfig
from retouch.data.dataset import Dataset
from retouch.data.sampler import batch_examples
from retouch.rollout import encoded
from retouch.rollout.encoded import EncodedData

from .runs import Config, train, weights

pytestmark = pytest.mark.usefixtures("shallow")


def reads_of(options: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """Weights of a run that keeps two examples in memory, the ids of the training data as they were read, and those of
    them that its own thread read."""
    ids: list[int] = []
    own: list[int] = []
    read = Dataset.__getitem__

    def noted(self: Dataset, index: Any) -> Any:
        example = read(self, index)
        if self.config.path.endswith("held_out"):  # evaluations read their own
            return example
        ids.append(example.id)
        own.extend([example.id] if threading.current_thread() is threading.main_thread() else [])
        return example

    with monkeypatch.context() as patch:
        patch.setattr(encoded, "CAPACITY", 2)
        patch.setattr(Dataset, "__getitem__", noted)
        run, _ = train(options)
    return weights(run), sorted(ids), sorted(own)


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "sft"}, pytest.param({"name": "dpo", "pairs": "offline"}, marks=pytest.mark.full)],
    ids=["sft", "dpo"],
)
def test_pictures_are_read_while_the_step_before_trains(
    algorithm: dict[str, Any], config: Config, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All by other threads, and as often as without them: nothing for a step that never comes."""
    options: dict[str, Any] = {"algorithm": algorithm, "rewards": {}, "training__max_steps": 5}
    if algorithm["name"] == "dpo":
        pairs = {"format": "manifest", "path": str(pairs_file(signs, tmp_path)), "resolution": [32, 64]}
        options |= {"data": pairs, "rollout__window": None, "rollout__noise_level": None}
    asked: list[Sequence[int]] = []
    real = EncodedData.read_ahead
    monkeypatch.setattr(EncodedData, "read_ahead", lambda data, rows: asked.append(rows) or real(data, rows))
    ahead, read, own = reads_of(config(**options), monkeypatch)
    assert len(read) >= 10 and own == []
    steps = [batch_examples(8, 2, 5, step) for step in range(5)]
    assert asked == [now + after for now, after in zip(steps, [*steps[1:], []], strict=True)]
    monkeypatch.setattr(EncodedData, "read_ahead", lambda *_: None)
    behind, without, own = reads_of(config(**options, name="behind"), monkeypatch)
    assert own == without == read
    assert all(torch.equal(tensor, behind[name]) for name, tensor in ahead.items())


def pairs_file(signs: Path, folder: Path) -> Path:
    """Signs with their words, preferred to blank ones."""
    preferred, rejected = (sorted((signs / half).glob("*_source.png")) for half in ("targets", "prompts"))
    entries = [
        {
            "image_path": str(win),
            "mask_path": str(win).replace("_source", "_mask"),
            "prompt": "The text is 'WORD'.",
            "win_path": str(win),
            "lose_path": str(lose),
        }
        for win, lose in zip(preferred, rejected, strict=True)
    ]
    (folder / "pairs.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder / "pairs.json"
