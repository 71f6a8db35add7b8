"""The second device where its memory ends, and what lives on it between two steps."""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import forked

FEW = ["sd_inpaint,full,off", "flux_fill,ip_adapter,on", "qwen_image,lora,off"]


def found(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `tests.rehearsal.full` prints."""
    command = [sys.executable, "-m", "tests.rehearsal.full", str(folder), *arguments]
    return json.loads(forked.run(command, check=True, timeout=3600).stdout.splitlines()[-1])


def agree(cells: dict[str, Any]) -> None:
    """Within a tenth, in which the conditions of the rows of a step are; and with gradients before the update."""
    for cell, one in cells.items():
        assert one["between"] == pytest.approx(one["counted"], rel=0.1), cell
        assert one["before_update"] == pytest.approx(one["counted"] + one["gradients"], rel=0.1), cell


def test_what_lives_between_steps_is_what_check_counts(tmp_path: Path) -> None:
    agree(found(tmp_path, "kept", *FEW))


@pytest.mark.full
@pytest.mark.parametrize("family", ["sd_inpaint", "flux_fill", "qwen_image"])
def test_what_lives_between_steps_is_what_check_counts_for_every_kind(family: str, tmp_path: Path) -> None:
    """With networks that wait on the CPU, and with those that stay."""
    cells = product([family], ("full", "lora", "ip_adapter"), ("off", "on"))
    agree(found(tmp_path, "kept", *map(",".join, cells)))


@pytest.mark.full
def test_what_lives_between_steps_of_a_quantized_network_is_what_check_counts(tmp_path: Path) -> None:
    agree(found(tmp_path, "kept", "flux_fill,lora,off,int8", "flux_fill,lora,off,nf4"))


MESSAGES = {
    "text": "in the text encoders (T); set model.offload_text_encoders=true, or run",
    "encode": "while encoding 2 images (T); set model.vae_batch=one",
    "decode": "while decoding 3 images (T); set model.vae_batch=one",
    "sample": "while sampling 3 images at once (T); set rollout.batch_size_per_device=1",
    "sample_one": "while sampling 1 images at once (T); set model.dtype=bf16",
}
"""Use of a model -> the message where it does not fit, with T for torch's own."""


def test_a_use_that_does_not_fit_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Networks that wait on the CPU are there again, and the use succeeds with more memory. They are not copied back:
    the text that is kept goes to the host, and nothing else."""
    uses = found(tmp_path, "parts")
    assert uses.keys() == MESSAGES.keys()
    for name, use in uses.items():
        told = re.sub(r"\(rehearsal out of memory\. .* are in use\)", "(T)", use["message"])
        assert told.startswith(f"out of memory {MESSAGES[name]}"), told
        assert use["left"] == 0, name
    copied = {name: use["to_host"] for name, use in uses.items()}
    assert 0 < copied.pop("text") < 100_000 and not any(copied.values()), copied


@pytest.mark.full
def test_a_step_that_does_not_fit_is_taken_in_halves_on_a_full_device(tmp_path: Path) -> None:
    """Nothing of the forward that did not fit is still there: half of its rows fit into what they need alone."""
    for algorithm, run in found(tmp_path, "halved").items():
        assert run["equal"] and len(run["told"]) == 1, (algorithm, run["told"])
        assert "optimizer.batch_size_per_device=2 from the start avoids this" in run["told"][0], algorithm
