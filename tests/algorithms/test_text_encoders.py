"""How often text encoders that wait on the CPU are moved to the device: a T5 of FLUX is 9.8 GB a move."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retouch.config import RunConfig, parse_run
from retouch.families.offload import OffloadedNetworks
from retouch.families.text import TextEncoders
from retouch.use.precompute import precompute

from .runs import Config, labelled, train

pytestmark = pytest.mark.usefixtures("shallow")

FOUR = {"lr": 1e-4, "batch_size_per_device": 1, "gradient_accumulation": 4}
"""A step of four forwards with a prompt each."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often encoders were moved to the device so far; on a CPU nothing is copied, but asked for all the same."""
    made: list[TextEncoders] = []
    to = TextEncoders.to

    def watched(self: TextEncoders, device: Any) -> None:
        made.append(self)
        to(self, device)

    monkeypatch.setattr(TextEncoders, "to", watched)
    return lambda: sum(texts.placement.moves for texts in set(made))


def pairs(signs: Path, folder: Path) -> Path:
    """A manifest whose examples prefer the sign with its word."""
    words, blank = (sorted((signs / name).glob("*_source.png")) for name in ("targets", "prompts"))
    entries = [
        {"id": n, "prompt": f"The text is '{n}'.", "image_path": str(a), "win_path": str(a), "lose_path": str(b)}
        | {"mask_path": str(a).replace("_source", "_mask")}
        for n, (a, b) in enumerate(zip(words, blank, strict=True))
    ]
    path = folder / "pairs.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def run_of(config: Config, algorithm: str, signs: Path, folder: Path) -> RunConfig:
    manifest = {"format": "manifest", "resolution": [32, 64]}
    data: dict[str, dict[str, Any]] = {
        "sft": {"data__path": str(signs / "targets"), "data__target": "auto"},
        "kto": {"data": manifest | {"path": str(labelled(signs, folder))}},
        "dpo": {"data": manifest | {"path": str(pairs(signs, folder))}},
    }
    options = {"dpo": {"pairs": "offline"}, "kto": {}, "sft": {}}[algorithm]
    return config(
        model__train={"kind": "lora", "rank": 4, "alpha": 8},
        algorithm={"name": algorithm, **options},
        rollout__window=None,
        rollout__noise_level=None,
        rewards={},
        optimizer=FOUR,
        training__max_steps=1,
        **data[algorithm],
    )


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("algorithm", ["sft", "kto", "dpo"])
def test_they_are_moved_once_for_the_prompts_of_a_step(
    algorithm: str, config: Config, signs: Path, tmp_path: Path, moves: Callable[[], int]
) -> None:
    train(run_of(config, algorithm, signs, tmp_path))
    assert moves() == 1


def test_they_are_moved_once_for_an_evaluation(config: Config, signs: Path, moves: Callable[[], int]) -> None:
    """Before the run, and in it only for the prompts of a step: the last evaluation has those of the first."""
    held_out = {"format": "self_bench", "path": str(signs / "held_out"), "resolution": [32, 64]}
    evaluation = {"data": held_out, "num_examples": 4, "num_steps": 1}
    train(config(evaluation=evaluation, rollout__batch_size_per_device=1, training__max_steps=1))
    assert moves() == 2


def test_they_are_moved_once_for_all_embeddings(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path, moves: Callable[[], int]
) -> None:
    precompute(parse_run(run_file()), tmp_path / "cache")
    assert moves() == 1


def test_text_encoders_have_left_before_the_autoencoder_comes(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T5 and an autoencoder beside it would need a larger device than either."""
    there: dict[int, str] = {}
    seen: list[set[str]] = []
    on_device, leave = OffloadedNetworks.on_device, OffloadedNetworks._leave

    @contextmanager
    def arriving(self: OffloadedNetworks) -> Iterator[None]:
        with on_device(self):
            there[id(self)] = type(self.networks[0]).__name__
            seen.append(set(there.values()))
            yield

    def leaving(self: OffloadedNetworks) -> None:
        leave(self)
        there.pop(id(self), None)

    monkeypatch.setattr(OffloadedNetworks, "on_device", arriving)
    monkeypatch.setattr(OffloadedNetworks, "_leave", leaving)
    precompute(parse_run(run_file(model__offload_vae=True)), tmp_path / "cache")
    assert {name for names in seen for name in names} == {"CLIPTextModel", "AutoencoderKL"}
    assert all(len(names) == 1 for names in seen)
