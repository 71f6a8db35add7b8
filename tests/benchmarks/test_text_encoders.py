"""The committed measurement of `benchmarks/text_encoders.py`, and that the script runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from text_encoders import PROMPTS, encoders, measure  # noqa: E402

SPEED = " ".join((REPOSITORY / "docs/speed.md").read_text(encoding="utf-8").split())
RESULT = json.loads((REPOSITORY / "benchmarks/results/text_encoders.json").read_text(encoding="utf-8"))


def test_the_page_holds_the_measured_ratio() -> None:
    assert RESULT["ratio"] >= 0.98 and RESULT["moves"] == {"for each prompt": PROMPTS, "once": 1}
    assert f"1 move instead of {PROMPTS} for {PROMPTS} prompts" in SPEED and RESULT["prompts"] == PROMPTS
    assert f"{RESULT['ratio']:.2f} x (medians of {RESULT['repetitions']} interleaved repetitions" in SPEED


def test_the_page_holds_the_bytes_of_the_released_encoders() -> None:
    with torch.device("meta"):
        made = encoders(released=True, dtype=torch.bfloat16)
    size = sum(p.numel() * p.element_size() for e in made.values() for p in e.model.parameters())
    assert f"the encoders of FLUX in bf16 are {size / 1e9:.1f} GB a move" in SPEED


def test_encoders_are_moved_once_for_all_prompts_and_encode_the_same() -> None:
    found = measure(released=False, device="cpu", repetitions=1, prompts=3)
    assert found["moves"] == {"for each prompt": 3, "once": 1}
    assert found["bytes_moved"]["for each prompt"] == 3 * found["bytes_moved"]["once"] > 0
