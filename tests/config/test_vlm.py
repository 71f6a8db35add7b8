"""`algorithm.name: vlm_grpo`: TRL's options checked without torch, and batches that fit."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from retouch.algorithms.vlm_grpo.config import VlmDerived, VlmGrpoConfig
from retouch.algorithms.vlm_grpo.trl_options import (
    COUNTS,
    DEFAULTS,
    MAY_BE_NULL,
    MOVED,
    NUMBERS,
    REFUSED,
    SAMPLING,
    grpo_fields,
    model_fields,
)
from retouch.config import ConfigError, RunConfig, load_run, numbers, parse_run
from retouch.config.run import TrainingConfig
from tests.command_line import retouch

from .conftest import REPOSITORY


def parse(*overrides: str, **trl: Any) -> RunConfig:
    run = {
        "name": "a",
        "model": {"family": "qwen_image_edit", "path": "tiny"},
        "data": {"format": "manifest", "path": "p"},
        "algorithm": {"name": "vlm_grpo", "trl": {"per_device_train_batch_size": 1, **trl}},
        "rewards": {"preservation": {}},
    }
    return parse_run(run, overrides)


def derived(world_size: int = 1, *overrides: str, **trl: Any) -> VlmDerived:
    found = numbers(parse(*overrides, **trl), world_size)
    assert isinstance(found, VlmDerived)
    return found


def test_names_are_those_of_the_installed_classes() -> None:
    """What is read from the source = what the classes have."""
    pytest.importorskip("trl")
    from dataclasses import fields

    from trl import GRPOConfig, ModelConfig

    own = {field.name for field in fields(GRPOConfig) if field.init and not field.name.startswith("_")}
    assert grpo_fields() == own
    assert model_fields() == {field.name for field in fields(ModelConfig)}
    assert len(own) > 150
    arguments: Any = {field.name: field.default for field in fields(GRPOConfig)}
    for defaults in (DEFAULTS, SAMPLING):
        assert {name: arguments[name] for name in defaults} == defaults
    assert MOVED.keys() | REFUSED.keys() | set(COUNTS) <= own | model_fields() | {"logging_dir", "model_name_or_path"}


def test_published_adapters_have_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, whatever the default is."""
    monkeypatch.setenv("DATA_PATH", "somewhere")
    files = sorted((REPOSITORY / "configs").rglob("*vlm_grpo*.yaml"))
    found = [load_run(file).algorithm for file in files]
    adapters = [one.trl["lora_dropout"] for one in found if isinstance(one, VlmGrpoConfig) and one.uses_adapter]
    assert adapters == [0.0] * 5 and len(found) == 7


def test_check_refuses_an_unknown_option_without_torch(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(parse().model_dump(mode="json")), encoding="utf-8")
    code = (
        "import sys; from retouch.cli import main\n"
        f"sys.argv = ['retouch', 'check', {str(file)!r}, 'algorithm.trl.num_generatons=8']\n"
        "try: main()\n"
        "finally: print('TORCH' if 'torch' in sys.modules or 'trl' in sys.modules else 'LIGHT')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "LIGHT"
    assert "algorithm.trl: num_generatons: unknown option of TRL; did you mean 'num_generations'?" in done.stderr


def test_options_of_grpo_and_of_its_adapter_pass() -> None:
    run = parse(
        beta=0.04,
        loss_type="dr_grpo",
        scale_rewards="none",
        use_vllm=True,
        vllm_mode="colocate",
        lora_r=8,
        use_peft=True,
    )
    assert run.algorithm.trl["vllm_mode"] == "colocate"  # type: ignore[union-attr]
    assert run.algorithm.uses_adapter  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MOVED)
def test_what_the_run_file_says_itself_is_moved_there(name: str) -> None:
    section, key = MOVED[name]
    value: Any = False if name == "gradient_checkpointing" else 40
    run = parse(**{name: value})
    assert name not in run.algorithm.trl  # type: ignore[union-attr]
    assert getattr(getattr(run, section) if section else run, key) == value
    again = parse_run(run.model_dump(mode="json"))
    assert again == run
    dotted = f"{section}.{key}" if section else key
    other = "true" if value is False else "41"
    with pytest.raises(ConfigError, match=rf"algorithm\.trl\.{name}: given {value!r}, but {dotted} is"):
        parse(f"{dotted}={other}", **{name: value})


@pytest.mark.parametrize(
    ("name", "wrong", "right", "says"),
    [
        ("learning_rate", [-1, "abc", True, float("nan"), float("inf")], [0, 1e-5], "a number, 0 or more"),
        ("temperature", [-1, 0, "hot"], [0.7, 2], "a number above 0"),
        ("top_p", [0, 1.5], [0.5, 1], "a number above 0, at most 1"),
        ("top_k", [-1, 1.5], [0, 50], "a whole number, 0 for every token"),
        ("min_p", [-0.1, 1.1], [0, 1], "a number from 0 to 1"),
        ("epsilon", [-0.2, [0.2]], [0.2], "a number, 0 or more"),
        ("adam_beta2", [1, -0.1], [0.999], "a number from 0 to below 1"),
        ("num_generations_eval", [0, "two"], [2], "a whole number above 0"),
        ("max_completion_length", [0, 1.5, True], [8], "a whole number above 0"),
    ],
)
def test_numbers_of_trl_are_numbers_in_range(name: str, wrong: list[Any], right: list[Any], says: str) -> None:
    for value in wrong:
        message = re.escape(f"algorithm.trl: {name}: given {value!r}; set {says}")
        with pytest.raises(ConfigError, match=f"{message}$"):
            parse(**{name: value})
    for value in right:
        assert parse(**{name: value}).algorithm.trl[name] == value  # type: ignore[union-attr]


def test_options_of_an_object_are_moved_too() -> None:
    made = {
        "name": "a",
        "model": {"family": "qwen_image_edit", "path": "tiny"},
        "data": {"format": "manifest", "path": "p"},
    }
    trl = {"per_device_train_batch_size": 1, "max_steps": 5}
    run = RunConfig.model_validate({**made, "algorithm": VlmGrpoConfig(trl=trl), "rewards": {"preservation": {}}})
    assert run == parse(**trl) and run.training.max_steps == 5
    training = TrainingConfig(eval_every=7)  # its keys stay beside the one that is moved there
    beside = {**made, "algorithm": {"name": "vlm_grpo", "trl": trl}, "rewards": {"preservation": {}}}
    run = RunConfig.model_validate({**beside, "training": training})
    assert (run.training.max_steps, run.training.eval_every) == (5, 7)


def test_null_is_what_trl_takes_it_for() -> None:
    for name in MAY_BE_NULL:
        assert parse(**{name: None}).algorithm.trl.get(name) is None  # type: ignore[union-attr]


def test_options_with_a_range_exist_and_their_defaults_are_in_it() -> None:
    pytest.importorskip("trl")
    from dataclasses import fields

    from trl import GRPOConfig, ModelConfig

    defaults = {field.name: field.default for kind in (ModelConfig, GRPOConfig) for field in fields(kind)}
    assert {name for name, (_, fits) in NUMBERS.items() if (own := defaults[name]) is None or fits(own)} == set(NUMBERS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_another_place_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: given 1, which has another place in a run file; set "):
        parse(**{name: 1})


@pytest.mark.parametrize(
    ("overrides", "trl", "message"),
    [
        ([], {"num_generations": "eight"}, "num_generations: given 'eight'; set a whole number above 0"),
        ([], {"num_generations": 1}, "num_generations: given 1, .* set 2 or more"),
        ([], {"lora_r": 8}, "lora_r: given, but use_peft is not"),
        ([], {"beta": 0.1}, "beta: given 0.1, .*set algorithm.trl.use_peft=true"),
        ([], {"steps_per_generation": 2, "generation_batch_size": 8}, "each of which follows from the other; set one"),
        ([], {"use_vllm": True, "generation_kwargs": {"n": 1}}, "generation_kwargs: given with use_vllm, .*leave it"),
        (["algorithm.negative_encoder=base"], {}, "negative_encoder: given 'base', .*set policy"),
        (
            ["algorithm.offload_diffusion_model=true", "model.offload_vae=true"],
            {},
            "model.offload_vae: given true beside algorithm.offload_diffusion_model, .*leave it out",
        ),
        (["model.train={kind: full}"], {}, "model.train: given, .*lora_r"),
        (["model.train={kind: lora, rank: 4}"], {}, "model.train: given"),
        (["model.free_text_encoders=true"], {}, "free_text_encoders: "),
        (["training.compile=true"], {}, "training.compile: given true, .*leave it out"),
        (["rollout.preset=fast"], {}, "rollout.preset: given 'fast'"),
        (["optimizer.state=8bit"], {}, "optimizer.state: given '8bit'"),
        (["optimizer.lr=0.1"], {}, r"optimizer.lr: given 0.1, .*algorithm.trl"),
        (["rollout.group_size=4"], {}, r"rollout.group_size: given 4, .*num_generations"),
        (["ema.decay=0.9"], {}, "ema: given"),
        (["warmup_data={format: manifest, path: p}"], {}, "warmup_data: given"),
        (["evaluation.weights=ema", "ema.decay=0.9"], {}, "ema"),
        (["model={family: sd_inpaint, path: tiny}"], {}, "model.family: given 'sd_inpaint', .*qwen_image"),
        (["rewards={preservation: {weight: 0}}"], {}, "every weight is 0"),
        (["data.resolution=30"], {}, "data.resolution: given 30"),
        (["data.reference_strip=32"], {}, "data.reference_strip: given 32, .*leave it out"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], trl: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*overrides, **trl)


def test_numbers_of_the_brief() -> None:
    """8 cards, one row each, two accumulated: 16 completions a step, two groups of 8."""
    brief = derived(8, gradient_accumulation_steps=2, num_generations=8)
    assert brief.global_completions_per_step == brief.global_completions_per_generation == 16
    assert (brief.global_prompts_per_generation, brief.images_per_generation_per_device) == (2, 2)
    assert brief.optimizer_steps_per_generation == 1
    assert brief.forwards_per_image == 2 * 10  # guidance of the released model


@pytest.mark.parametrize(
    ("trl", "cycle", "generations"),
    [
        ({"gradient_accumulation_steps": 8}, 1, 200),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4, 50),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_iterations": 2}, 8, 25),
        ({"gradient_accumulation_steps": 16, "steps_per_generation": 8}, 1, 400),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 8}, 8, 75),
        ({"gradient_accumulation_steps": 2, "generation_batch_size": 8}, 4, 50),
    ],
)
def test_cycles(trl: dict[str, int], cycle: int, generations: int) -> None:
    found = derived(1, "training.max_steps=200", "training.checkpoint_every=0", num_generations=8, **trl)
    assert (found.optimizer_steps_per_generation, found.generations) == (cycle, generations)


def test_checkpoints_lie_between_cycles() -> None:
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_generations": 8}
    derived(1, "training.checkpoint_every=8", **options)
    with pytest.raises(
        ConfigError, match=r"checkpoint_every: given 10, .*every 4 optimizer steps.*multiple of 4, such as 8"
    ):
        derived(1, "training.checkpoint_every=10", **options)


def test_a_run_ends_between_cycles() -> None:
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 8, "num_generations": 8}
    derived(1, "training.max_steps=12", "training.checkpoint_every=0", **options)
    with pytest.raises(ConfigError, match=r"max_steps: given 10, .*every 4 optimizer steps.*multiple of 4, such as 8"):
        derived(1, "training.max_steps=10", "training.checkpoint_every=0", **options)


@pytest.mark.parametrize(
    ("world_size", "trl", "message"),
    [
        (1, {"num_generations": 8}, r"num_generations: given 8, but 1 completions .*for example 8"),
        (4, {"num_generations": 8}, r"for example 2"),
        (2, {"generation_batch_size": 9}, "generation_batch_size: given 9; set a multiple of 2"),
        (0, {}, "--world-size: given 0"),
    ],
)
def test_groups_must_fit(world_size: int, trl: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        derived(world_size, **trl)


def test_check_prints_them(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    run = parse("rollout.guidance_scale=1", num_generations=8, gradient_accumulation_steps=8)
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")), encoding="utf-8")
    outcome = retouch("check", file, "--verbose")
    assert outcome.code == 0, outcome.err
    assert "global completions per step      8" in outcome.out
    assert "forwards per image               10" in outcome.out
