"""Loading and scoring leave what the whole process shares as it was: torch's default dtype, generators, the rest of
`tests.process_state`. `conftest` watches every scorer of the package that a test of this folder loads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rapidocr.ch_ppocr_det.main import DetPreProcess, TextDetector

from retouch.config import ConfigError
from retouch.process.process_wide import loading
from retouch.rewards import REWARDS
from retouch.rewards.base import NO_NETWORK
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import ScorerSpec
from retouch.rewards.scorers.jpeg_size import JpegSizeReward
from retouch.rewards.table import LocalRewards, RewardTable
from retouch.training.scoring import wait_for_rewards
from tests.process_state import changes, process_state
from tests.rewards.fakes import Brightness, Gated, half_mask, item, picture
from tests.tiny_models import tiny_clip


class Careless(Brightness):
    """Does what `from_pretrained` does with the default dtype, slowly, and draws numbers."""

    def __init__(self, entered: threading.Event, until: threading.Event) -> None:
        super().__init__()
        self.entered, self.until = entered, until

    def load(self, device: str) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        self.entered.set()
        self.until.wait(0.2)
        torch.set_default_dtype(before)
        torch.rand(3)
        random.random()
        np.random.random()


def test_two_rewards_do_not_load_at_once() -> None:
    """The first waits for the second to enter, which would save its bf16 and restore that in the end."""
    first_entered, second_entered = threading.Event(), threading.Event()
    before = process_state()
    first = LocalRewards({"a": Careless(first_entered, second_entered)})
    assert first_entered.wait(60)
    second = LocalRewards({"b": Careless(second_entered, threading.Event())})
    try:
        assert first.wait_ready(10) == second.wait_ready(10) == []
        assert changes(before, process_state()) == []
    finally:
        torch.set_default_dtype(torch.float32)
        first.close()
        second.close()


class LoadsClip:
    def __init__(self, dtype: torch.dtype) -> None:
        self.spec, self.dtype = ScorerSpec("clip", (-1, 1), frozenset(), "1", "-"), dtype

    def load(self, device: str) -> None:
        from transformers import CLIPModel

        self.model: Any = CLIPModel.from_pretrained(tiny_clip(), dtype=self.dtype)

    def score(self, items: Sequence[Any]) -> list[Any]:
        return []


def test_networks_of_two_precisions_beside_each_other() -> None:
    """`vlm` beside a gold `clip`: of ten tries seven left bf16 as the default before loads took turns."""
    for _ in range(10):
        pair = [
            LocalRewards({name: LoadsClip(dtype)}) for name, dtype in (("vlm", torch.bfloat16), ("c", torch.float32))
        ]
        try:
            assert [one.wait_ready(60) for one in pair] == [[], []]
            assert torch.get_default_dtype() == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
            for one in pair:
                one.close()


class Leaves(Brightness):
    """Leaves everything changed that `loading` restores."""

    def load(self, device: str) -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        raise RuntimeError("no weights")


def test_what_a_load_leaves_behind_is_restored() -> None:
    before = process_state()
    local = LocalRewards({"b": Leaves()})
    with pytest.raises(RuntimeError, match="no weights"):
        local.wait_ready(60)
    local.close()
    assert changes(before, process_state()) == []


def test_a_load_does_not_take_memory_of_gpus_that_the_process_has_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of these would initialize CUDA on each."""

    def initializes(*_: Any) -> None:
        raise AssertionError("CUDA is initialized")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", initializes)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", initializes)
    with loading():
        pass


def test_a_load_within_a_load_is_one() -> None:
    with loading(), loading():
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32


def test_a_reward_of_weight_0_does_not_load_beside_the_run() -> None:
    """Its server may come later; a scorer of this process is waited for."""
    table = RewardTable({"jpeg_size": JpegSizeReward(weight=0.0)}, RewardClientConfig())
    gate = Gated(gate_load=True)
    table._backends[table._places["jpeg_size"]] = LocalRewards({"jpeg_size": gate})
    waiting = threading.Thread(target=table.wait_ready, args=(0.0,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.open()
    waiting.join(60)
    assert not waiting.is_alive()
    table.close()


def test_a_run_does_not_begin_under_another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RewardClientConfig()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(ConfigError, match=r"^rewards: given torch\.bfloat16 as torch's default dtype .* remove"):
            wait_for_rewards(RewardTable({}, client), client)
    finally:
        torch.set_default_dtype(torch.float32)
    wait_for_rewards(RewardTable({}, client), client)


LOADABLE: dict[str, dict[str, Any]] = {
    **{name: {} for name, reward in REWARDS.items() if reward.cpu_only == NO_NETWORK},
    "anytext": {"threads": 1},
    "clip": {"path": tiny_clip(), "processor": ""},
    "clip_r_precision": {"path": tiny_clip(), "processor": ""},
    "cvtg": {"threads": 1},
    "flow_grpo_ocr": {"threads": 1},
    "glyph_structure": {"threads": 1},
    "ocr": {"threads": 1},
    "ocr_lines": {"threads": 1},
    "pickscore": {"path": tiny_clip(), "processor": ""},
    "recognizer": {},
    "textedit": {"threads": 1},
}
"""The others of the registry need files that their own tests make; `conftest` watches these."""


@pytest.mark.parametrize("name", LOADABLE)
def test_a_scorer_leaves_the_process_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # lines are looked for in few pixels: what a reader finds does not matter here, and takes two seconds
    monkeypatch.setattr(TextDetector, "get_preprocess", lambda own: DetPreProcess(160, "min", own.mean, own.std))
    before = process_state()
    local = LocalRewards({name: REWARDS[name].model_validate({**LOADABLE[name], "scorer": name}).make()})
    assert local.wait_ready(60) == []
    whole = item(0, prompt="a sign 'AB'", source=picture(1), mask=half_mask(), metadata={"text": "AB"})
    assert len(local.submit([whole]).result(60)[name]) == 1
    local.close()
    assert changes(before, process_state()) == []
