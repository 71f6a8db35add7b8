"""Another default dtype of torch, which a library may leave behind, changes no bit of a run.

Libraries rely on it: inside the networks of diffusers, transformers and peft, and inside TRL, it is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from retouch.algorithms.vlm_grpo.scoring import CompletionScorer
from retouch.config import RunConfig
from retouch.training import session
from tests.selection import rows

from .runs import Config, Use, brightness, same_weights, train, weights
from .test_cells import ALGORITHMS, cell
from .vlm_runs import RunFile, vlm_file
from .vlm_runs import records as vlm_records
from .vlm_runs import train as vlm_train
from .vlm_runs import weights as vlm_weights

__all__ = ["vlm_file"]

OTHER = torch.bfloat16

LIBRARIES = {"diffusers", "transformers", "peft"}


@contextmanager
def other_default() -> Iterator[None]:
    torch.set_default_dtype(OTHER)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def libraries_in_fp32() -> Iterator[None]:
    """Forwards of the libraries' networks have the default that they were written for."""
    outside: list[torch.dtype] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if type(module).__module__.partition(".")[0] in LIBRARIES:
            outside.append(torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if type(module).__module__.partition(".")[0] in LIBRARIES:
            torch.set_default_dtype(outside.pop())

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    yield
    for handle in handles:
        handle.remove()
    assert not outside


def numbers(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of metrics without what differs from run to run."""
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


CASES = [*(("flux_fill", algorithm) for algorithm in ALGORITHMS), ("sd_inpaint", "grpo"), ("sd_inpaint", "nft")]


@pytest.mark.parametrize(("family", "algorithm"), rows(CASES, [("flux_fill", "sft"), ("flux_fill", "grpo")]))
def test_the_bits_of_a_run_are_the_same_under_another_default(
    family: str,
    algorithm: str,
    config: Config,
    scripted: Use,
    signs: Path,
    libraries_in_fp32: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is set once models and rewards have loaded."""
    scripted(brightness)

    def made(name: str) -> RunConfig:
        return cell(config, family, algorithm, "lora", name=name, signs=signs)

    plain, expected = train(made("plain"))
    real = session.log_header
    monkeypatch.setattr(session, "log_header", lambda *rest: (torch.set_default_dtype(OTHER), real(*rest)))
    try:
        other, found = train(made("other"))
        assert torch.get_default_dtype() == OTHER
    finally:
        torch.set_default_dtype(torch.float32)
    assert numbers(found) == numbers(expected)
    assert same_weights(weights(plain), weights(other))


def test_the_bits_of_a_text_encoder_are_the_same(
    vlm_file: RunFile, libraries_in_fp32: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default is another one from the completions to their rewards; the rest is TRL's."""
    expected = vlm_train(vlm_file(name="plain"))
    assert expected.code == 0, expected.err
    real = CompletionScorer.score

    def score(self: CompletionScorer, *rest: Any, **options: Any) -> Any:
        with other_default():
            return real(self, *rest, **options)

    monkeypatch.setattr(CompletionScorer, "score", score)
    found = vlm_train(vlm_file(name="other"))
    assert found.code == 0, found.err
    assert vlm_records(tmp_path / "other") == vlm_records(tmp_path / "plain")
    assert same_weights(vlm_weights(tmp_path / "plain", 2), vlm_weights(tmp_path / "other", 2))
