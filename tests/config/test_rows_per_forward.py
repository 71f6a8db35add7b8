"""Rows of the network in a training forward: a function of the run file and the kind of device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from retouch.config import RunConfig, load_run
from retouch.config.check import warnings_of
from retouch.config.derived import parts_per_forward, rows_per_forward
from retouch.training.step import ForwardSize
from tests.command_line import retouch

from .conftest import TINY

RunWith = Callable[..., RunConfig]
AUTO = "optimizer.steps_per_forward=auto"
SD = "model={family: sd_inpaint, path: tiny}"
GIVEN = ("data={format: manifest, path: pairs.json, resolution: 64}", "rewards={}")


def sizes(rows: int, sampled: int = 24, steps: int = 9) -> tuple[str, ...]:
    rollout = f"rollout={{group_size: 8, batch_size_per_device: {sampled}, num_steps: {steps}}}"
    return f"optimizer={{batch_size_per_device: {rows}, gradient_accumulation: 1}}", rollout, AUTO


@pytest.mark.parametrize(
    ("overrides", "cpu", "gpu"),
    [
        # 9 trained steps of a row: on a CPU 8 rows, in two forwards of 5 and 4; on a GPU 24
        ((*sizes(1), "algorithm={name: grpo}"), (5, 5), (9, 9)),
        ((*sizes(4), "algorithm={name: grpo}"), (2, 8), (5, 20)),  # 24 / 4 = 6, in two forwards: 5 and 4
        ((*sizes(8), "algorithm={name: grpo}"), (1, 8), (3, 24)),  # what was measured
        ((*sizes(48), "algorithm={name: ppo}"), (1, 48), (1, 48)),  # a row is never split
        # guidance doubles them; DDIM trains all steps but the last, 8
        ((*sizes(2), SD, "algorithm={name: grpo}", "rollout.guidance_scale=7"), (2, 8), (4, 16)),
        ((*sizes(8), SD, "algorithm={name: grpo}", "rollout.guidance_scale=7"), (1, 16), (1, 16)),
        ((*sizes(8), SD, "algorithm={name: grpo}", "rollout.guidance_scale=1"), (1, 8), (3, 24)),
        # no forward of training is larger than those of sampling
        ((*sizes(1, 4), "algorithm={name: grpo}"), (3, 3), (3, 3)),
        ((*sizes(8, 4), "algorithm={name: grpo}"), (1, 8), (1, 8)),
        ((*sizes(2, 4), SD, "algorithm={name: grpo}", "rollout.guidance_scale=7"), (2, 8), (2, 8)),
        # noised copies, which have no guidance; a pair has two members
        ((*sizes(4), "algorithm={name: nft, timesteps_per_image: 4}"), (2, 8), (4, 16)),
        ((*sizes(8), SD, "algorithm={name: nft, timesteps_per_image: 9}"), (1, 8), (3, 24)),
        ((*sizes(2), "algorithm={name: dpo, timesteps_per_pair: 4}"), (2, 8), (4, 16)),
        ((*sizes(8), "algorithm={name: dpo, timesteps_per_pair: 4}"), (1, 16), (1, 16)),
        # given images: nothing is sampled to compare with
        ((*sizes(2, 1), "algorithm={name: kto, timesteps_per_image: 9}", *GIVEN), (3, 6), (9, 18)),
        ((*sizes(2, 1), "algorithm={name: dpo, pairs: offline, timesteps_per_pair: 3}", *GIVEN), (2, 8), (3, 12)),
        # one part: always the rows of the file
        ((*sizes(5), "algorithm={name: sft}", "rewards={}"), (1, 5), (1, 5)),
    ],
)
def test_auto_by_hand(
    overrides: tuple[str, ...], cpu: tuple[int, int], gpu: tuple[int, int], run_with: RunWith
) -> None:
    run = run_with(*overrides)
    for device, expected in (("cpu", cpu), ("cuda", gpu), ("xpu", gpu)):
        assert (parts_per_forward(run, device), rows_per_forward(run, device)) == expected, device


@pytest.mark.parametrize("value", ["null", "1", "2", "50"])
@pytest.mark.parametrize("algorithm", ["{name: grpo}", "{name: nft, timesteps_per_image: 9}"])
def test_a_given_number_is_taken_on_every_device(value: str, algorithm: str, run_with: RunWith) -> None:
    run = run_with(*sizes(8), f"algorithm={algorithm}", f"optimizer.steps_per_forward={value}")
    expected = 9 if value in ("null", "50") else int(value)
    assert {parts_per_forward(run, device) for device in ("cpu", "cuda")} == {expected}


def test_forwards_have_nearly_equal_sizes_and_every_step_is_in_one() -> None:
    assert spans(5, 5) == [range(5)]
    assert spans(5, 2) == [range(2), range(2, 4), range(4, 5)]
    for parts, size in product(range(1, 12), repeat=2):
        assert [step for piece in spans(parts, size) for step in piece] == [*range(parts)]


def spans(parts: int, size: int) -> list[range]:
    """The steps of a row in the forwards of one."""
    forwards: Any = SimpleNamespace(parts_per_forward=size, chunks=lambda rows: [rows])
    return [span for _, span in ForwardSize.parts(forwards, torch.zeros(1), parts)]


def test_it_is_the_default_and_null_keeps_its_meaning(run_with: RunWith) -> None:
    assert run_with().optimizer.model_fields["steps_per_forward"].default == "auto"
    assert run_with("optimizer.steps_per_forward=null").optimizer.steps_per_forward is None


def test_files_of_this_package_pin_what_they_had() -> None:
    """A file that trains several steps or copies of an image would have other forwards under the new default."""
    root = TINY.parents[1]
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.yaml"))}
    variables_of_all = set(re.findall(r"\$\{([A-Z_]+)", "".join(texts.values())))
    for file, text in texts.items():
        section = yaml.safe_load(text.replace("${", "$${"))
        if not isinstance(section, dict) or "name" not in section or "evaluation" in file.parts:
            continue
        variables = pytest.MonkeyPatch()
        with variables.context() as patch:
            for name in variables_of_all:
                patch.setenv(name, "somewhere")
            run = load_run(file)
        if run.algorithm.parts_of_row(run)[0] > 1:
            assert run.optimizer.steps_per_forward != "auto", file
        assert not run.rollout.shares_first_step, file


def test_check_prints_the_rows_of_a_forward(tmp_path: Path) -> None:
    window = "rollout.window={size: 4, range: [0, 1]}"
    options = (TINY, AUTO, window, "optimizer.batch_size_per_device=8", "optimizer.gradient_accumulation=12")
    lines = retouch("check", *options, "rollout.batch_size_per_device=8", "--verbose").out.splitlines()
    [line] = [line for line in lines if line.split()[:2] == ["a", "forward"]]
    assert line.split(maxsplit=2)[2] == "8 rows of the network in training"
    larger = (*options, "rollout.batch_size_per_device=24")
    assert json.loads(retouch("check", *larger, "--json").out)["rows_per_forward"] == {"cpu": 8, "gpu": 16}
    assert "8 rows of the network in training on a CPU, 16 on a GPU" in retouch("check", *larger, "--verbose").out


@pytest.mark.parametrize("name", ["flux_fill_sft", "flux_fill_reward_gradient", "qwen_image_edit_vlm_grpo"])
def test_a_stored_null_is_nothing_to_runs_without_parts(name: str) -> None:
    """Their run directories of earlier versions have it: it was the default."""
    run = load_run(TINY.parent / f"{name}.yaml", ["optimizer.steps_per_forward=null"])
    assert run.optimizer.steps_per_forward is None
    assert not [line for line in warnings_of(run) if "steps_per_forward" in line]
