"""Every rule has a bad example and its message, and every kind of constraint on a single option."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from retouch.config import ConfigError, RunConfig
from retouch.config.check import require_trainable, warnings_of
from retouch.data.formats.mmmg import DISCIPLINES, LEVELS

Problems = Callable[..., list[str]]
RunWith = Callable[..., RunConfig]

POSITIVE = "input should be greater than 0"
NOT_NEGATIVE = "input should be greater than or equal to 0"
AT_MOST_1 = "input should be less than or equal to 1"
FINITE = "input should be a finite number"
A_SIZE = "write the side of a square in pixels, like 512, or [height, width], like [512, 768]"
AN_ADDRESS = (
    "set null (score in this process), auto, http://host:port, a list of these, or the endpoints file that "
    "`retouch reward serve` wrote"
)

# One row for each kind of constraint, and every one of those that docs/configuration.md does not show: that page is
# compared with the schema, bounds and choices included.
BOUNDS = [
    ("name", "'a b'", "'a b'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("name", "x" * 201, repr("x" * 201), "string should have at most 200 characters"),
    ("name", "-a", "'-a'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("logging.project", "a/b", "'a/b'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("logging.group", "''", "''", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("seed", "-1", "-1", NOT_NEGATIVE),
    ("seed", "2147483648", "2147483648", "input should be less than 2147483648"),
    ("seed", "1.5", "1.5", "input should be a valid integer, got a number with a fractional part"),
    ("model.dtype", "fp64", "'fp64'", "input should be 'fp32', 'bf16' or 'fp16'"),
    ("model.max_sequence_length", "513", "513", "input should be less than or equal to 512"),
    ("data.resolution", "big", "'big'", A_SIZE),
    ("data.resolution", "0", "0", A_SIZE),
    ("data.resolution", "[64]", "[64]", A_SIZE),
    ("data.resolution", "[64, -64]", "[64, -64]", A_SIZE),
    ("data.prompt_template", "'Write it'", "'Write it'", "it must contain {text}, the place of the text to write"),
    ("rollout.guidance_scale", ".inf", "inf", FINITE),
    ("rollout.noise_level", "0", "0", POSITIVE),
    # what is allocated, or looped over
    ("rollout.num_steps", str(10**30), str(10**30), "input should be less than or equal to 1000"),
    ("rollout.group_size", str(10**9), str(10**9), "input should be less than or equal to 1000000"),
    ("optimizer.batch_size_per_device", str(10**9), str(10**9), "input should be less than or equal to 1000000"),
    ("data.resolution", "16385", "16385", A_SIZE),
    ("rewards.ocr.threads", str(10**9), str(10**9), "input should be less than or equal to 1024"),
    ("algorithm.timestep_fraction", "1.5", "1.5", AT_MOST_1),
    ("rewards.ocr.weight", ".nan", "nan", FINITE),
    ("rewards.ocr.crop", "hole", "'hole'", "input should be 'none' or 'mask_box'"),
    ("rewards.ocr.url", "5", "5", AN_ADDRESS),
    ("rewards.ocr.url", "''", "''", AN_ADDRESS),
    ("rewards.ocr.url", "[]", "[]", AN_ADDRESS),
    ("rewards.ocr.url", "[auto, '']", "['auto', '']", AN_ADDRESS),
    ("rewards.vlm.path", "''", "''", "string should have at least 1 character"),
    ("optimizer.lr", ".inf", "inf", FINITE),
    ("optimizer.lr", "1e-4x", "'1e-4x'", "input should be a valid number, unable to parse string as a number"),
    ("training.gradient_checkpointing", "ys", "'ys'", "input should be a valid boolean, unable to interpret input"),
]
_EDIT = "{format: complex_edit, path: somewhere, resolution: 64, %s}"
_MMMG = "{format: mmmg, path: somewhere, resolution: 64, %s}"
ELEMENTS = [
    ("optimizer.betas", "[0.9, 1.0]", "optimizer.betas.1: given 1.0; input should be less than 1"),
    ("optimizer.betas", "[0.9]", "optimizer.betas.1: required and not set"),
    (
        "logging.sinks",
        "tensorboard",
        "logging.sinks: given 'tensorboard'; expected a list; set logging.sinks=[tensorboard]",
    ),
    (
        "logging.sinks",
        "[mlflow]",
        "logging.sinks.0: given 'mlflow'; input should be 'tensorboard', 'wandb' or 'trackio'",
    ),
    (
        "model",
        "{family: qwen_image, distillation_lora: {path: a, scale: 0}}",
        f"model.distillation_lora.scale: given 0; {POSITIVE}",
    ),
    ("rollout.window", "{range: [0, 2]}", f"rollout.window.range.1: given 2; {AT_MOST_1}"),
    ("algorithm", "{name: dpo, beta: 0}", f"algorithm.beta: given 0; {POSITIVE}"),
    *(
        (
            "algorithm",
            f"{{name: nft, old_policy: {written}}}",
            f"algorithm.old_policy: given {shown}; input should be 'copy', 'frozen', 'ramp_half' or 'ramp_full'",
        )
        # 0, 1 and 2 have a name; true is not 1, nor is 1.0 or '1'
        for written, shown in (("3", "3"), ("-1", "-1"), ("true", "True"), ("1.0", "1.0"), ("'1'", "'1'"))
    ),
    (
        "model",
        "{family: qwen_image_edit, path: Qwen/Qwen-Image-Edit-2509}",
        (
            "model.path: given 'Qwen/Qwen-Image-Edit-2509', but model.variant is 'edit'; set model.variant=edit_plus, "
            "or model.path=Qwen/Qwen-Image-Edit"
        ),
    ),
    (
        "model.train",
        "{kind: lora, targets: []}",
        "model.train.targets: given []; list should have at least 1 item after validation, not 0",
    ),
    (
        "model.train",
        "{kind: ip_adapter, scale: [1, -1]}",
        "model.train.scale: given [1, -1]; write a factor of 0 or more, like 1.0, or a list with one for each block",
    ),
    *(
        (
            "data",
            _EDIT % f"complexity: {written}",
            f'data.complexity: given {shown}; write numbers from 1 to 8, like "8", "1-8" or "1,3,5"',
        )
        for written, shown in (
            ("9", "'9'"),
            ("0-3", "'0-3'"),
            ("'5-3'", "'5-3'"),
            ("'1,,2'", "'1,,2'"),
            ("all", "'all'"),
        )
    ),
    (
        "data",
        _MMMG % "levels: 'PhD, kindergarten'",
        f"data.levels: given 'PhD, kindergarten': 'kindergarten' is none; write all, or some of {', '.join(LEVELS)}",
    ),
    (
        "data",
        _MMMG % "disciplines: Maths",
        f"data.disciplines: given 'Maths': 'Maths' is none; write all, or some of {', '.join(DISCIPLINES)}",
    ),
]


@pytest.mark.parametrize(("key", "written", "shown", "says"), BOUNDS)
def test_a_value_out_of_bounds(key: str, written: str, shown: str, says: str, problems: Problems) -> None:
    added = ["rewards.vlm={}"] if key.startswith("rewards.vlm.") else []
    assert problems(*added, f"{key}={written}") == [f"small.yaml: {key}: given {shown}; {says}"]


@pytest.mark.parametrize(("key", "written", "line"), ELEMENTS)
def test_a_value_inside_a_list_or_section(key: str, written: str, line: str, problems: Problems) -> None:
    assert problems(f"{key}={written}") == [f"small.yaml: {line}"]


# --- combinations ---


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("model.path=''",), "model.path: empty; set a hub id or a folder in the diffusers layout"),
        (
            ("model.path=''", "algorithm={name: sft}", "rewards={}"),
            "model.path: empty; set a hub id or a folder in the diffusers layout",
        ),
        (
            ("rewards={}",),
            (
                "rewards: none given, but algorithm.name is 'grpo', which trains on rewards; set for example rewards: "
                "{ocr: {weight: 1.0}}"
            ),
        ),
        (
            ("rewards={ocr: {weight: 0}, preservation: {weight: 0}}",),
            "rewards: every weight is 0, but the objective is their weighted sum; set one weight above 0",
        ),
        (
            ("rollout.group_size=1",),
            (
                "rollout.group_size: given 1, but algorithm.baseline=group compares samples of one example with "
                "each other; set group_size to 2 or more (4-16 is usual), or algorithm.baseline=batch"
            ),
        ),
        (
            ("rollout.group_size=1", "algorithm={name: ppo, scale: group}"),
            (
                "rollout.group_size: given 1, but algorithm.scale=group compares samples of one example with each "
                "other; set group_size to 2 or more (4-16 is usual), or algorithm.scale=batch"
            ),
        ),
        (
            ("algorithm.sft_steps=11", "training.max_steps=10"),
            (
                "algorithm.sft_steps: given 11, more than training.max_steps 10, which counts them too; set a larger "
                "training.max_steps"
            ),
        ),
        (
            ("algorithm.timestep_fraction=0.5", "rollout.window={size: 2}"),
            (
                "algorithm.timestep_fraction: given 0.5 beside rollout.window; the window already selects the "
                "trained steps; leave timestep_fraction at 1.0"
            ),
        ),
        (
            ("training.shard_gradients=false",),
            (
                "training.shard_gradients: given false, but training.sharding is none; leave it out, or set "
                "sharding=fsdp2"
            ),
        ),
        (
            ("training.sharding=fsdp2", "model.train={kind: ip_adapter}"),
            (
                "training.sharding: given 'fsdp2', but the files of a style adapter need its frozen weights whole; set "
                "sharding=zero2, or none"
            ),
        ),
        (
            ("training.sharding=zero3", "training.shard_gradients=false"),
            (
                "training.shard_gradients: given false, but training.sharding=zero3 keeps no whole gradients; leave it "
                "out, or set sharding=zero2"
            ),
        ),
        (
            ("training.sharding=fsdp2", "training.compile=true"),
            (
                "training.compile: given true beside training.sharding=fsdp2, which has hooks in each "
                "block; set compile=false"
            ),
        ),
        (
            ("training.sharding=fsdp2", "optimizer.state=8bit"),
            (
                "optimizer.state: given '8bit' beside training.sharding=fsdp2, which shards them already, in fp32; "
                "set state=fp32"
            ),
        ),
        (
            ("algorithm={name: dpo}", "rollout.preset=fast"),
            (
                "rollout.preset: given 'fast', but dpo has no presets; leave preset out, and "
                "set rollout.num_steps and guidance_scale"
            ),
        ),
        (
            ("training.sharding=fsdp2", "training.mixed_precision=fp16"),
            (
                "training.mixed_precision: given 'fp16', whose loss scaler would see only its own piece of the "
                "gradients under training.sharding=fsdp2; set bf16"
            ),
        ),
        (
            ("evaluation.weights=ema",),
            (
                "evaluation.weights: given 'ema', but there is no ema section; set ema.decay=0.999, or "
                "evaluation.weights=raw"
            ),
        ),
        (
            ("rollout={num_steps: 4, window: {size: 3, range: [0, 0.5]}}",),
            (
                "rollout.window.size: given 3, but window.range [0.0, 0.5] of num_steps 4 holds 2 stochastic steps of "
                "flow_sde; widen the range or lower the size"
            ),
        ),
        (
            ("rollout={window: {size: 1, range: [0.5, 0.2]}}",),
            (
                "rollout.window.size: given 1, but window.range [0.5, 0.2] of num_steps 10 holds 0 stochastic steps of "
                "flow_sde; widen the range or lower the size"
            ),
        ),
        (
            ("rollout={step_rule: cps, window: {size: 2, range: [0.8, 1.0]}}",),
            (
                "rollout.window.size: given 2, but window.range [0.8, 1.0] of num_steps 10 holds 1 stochastic steps of "
                "cps; widen the range or lower the size"
            ),
        ),
        (
            ("rollout={step_rule: cps, num_steps: 1}",),
            (
                "rollout.num_steps: given 1, but step_rule cps adds no noise in the last step; set num_steps to 2 or "
                "more, or another step_rule"
            ),
        ),
        (
            ("rollout={step_rule: cps, noise_level: 1.2}",),
            (
                "rollout.noise_level: given 1.2, but for step_rule cps it is a share in (0, 1]; set 0.8, its default, "
                "or another step_rule"
            ),
        ),
        (
            ("rewards.ocr={url: 'http://a:1', detect: false}",),
            (
                "rewards.ocr.detect: given beside url 'http://a:1', but the options of a scorer belong to its server; "
                """start it with `retouch reward serve ocr --options '{"ocr": {"detect": false}}'`, and replace the """
                """entry: 'rewards.ocr={"url": "http://a:1"}'"""
            ),
        ),
        (
            ("data.resolution=[64, 100]",),
            "data.resolution: given (64, 100); flux_fill needs multiples of 8; set [64, 96]",
        ),
        (
            ("data.reference=mask_box",),
            (
                "data.reference: given 'mask_box', but nothing in the run reads a reference; set "
                "model.train.kind=ip_adapter, a style reward or a reference_strip, or leave it out"
            ),
        ),
        (
            ("data.reference=half_box", "rewards={style: {}}"),
            (
                "data.reference: given 'half_box', which repaints half of a text; no reward can read that; set "
                "it under warmup_data (SFT: data, with evaluation.data), and set mask_box here"
            ),
        ),
        (
            ("data.reference_strip=12",),
            "data.reference_strip: given 12; flux_fill needs multiples of 8; set 16",
        ),
        (
            ("data.reference_strip=16", "evaluation.data={format: manifest, path: x, resolution: 64}"),
            (
                "evaluation.data.reference_strip: given None, but data.reference_strip is 16; a model is trained and "
                "used with one height; set both to the same"
            ),
        ),
        (
            ("data.reference_strip_fit=full_width",),
            (
                "data.reference_strip_fit: given 'full_width', but there is no strip to fill; set reference_strip to "
                "its height in pixels (288 holds a reference of 16:9 at 512), or leave reference_strip_fit out"
            ),
        ),
        (
            (
                "data.reference_strip=16",
                "data.reference_strip_fit=full_width",
                "evaluation.data={format: manifest, path: x, resolution: 64, reference_strip: 16}",
            ),
            (
                "evaluation.data.reference_strip_fit: given 'contain', but data.reference_strip_fit is 'full_width'; a "
                "model is trained and used with one layout; set evaluation.data.reference_strip_fit=full_width"
            ),
        ),
        (
            ("data={format: prompts, path: x.txt, resolution: 64}",),
            (
                "data.format: given 'prompts', which has no images, but the run needs mask, source in every example; "
                "set format=manifest, or model.family=qwen_image with full weights or LoRA"
            ),
        ),
        (
            ("data={format: complex_edit, path: x, resolution: 64}",),
            (
                "data.format: given 'complex_edit', which has sources alone, but the run needs mask, source in every "
                "example; set format=manifest, or model.family=qwen_image_edit with full weights or LoRA"
            ),
        ),
        (
            ("logging.sinks=[tensorboard]", "logging.group=first"),
            (
                "logging.group: given 'first', which wandb and trackio read, but logging.sinks is ['tensorboard']; add "
                "one of them, or leave group out"
            ),
        ),
        (
            ("model.path=someone/FLUX", "data.resolution=500"),
            "data.resolution: given 500; flux_fill needs multiples of 16; set 496",
        ),
        (
            ("evaluation.data={format: manifest, path: x, resolution: 3}",),
            "evaluation.data.resolution: given 3; flux_fill needs multiples of 8; set 8",
        ),
        (
            ("warmup_data={format: manifest, path: x, resolution: 20}",),
            "warmup_data.resolution: given 20; flux_fill needs multiples of 8; set 16",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_a_combination_that_cannot_work(overrides: tuple[str, ...], line: str, problems: Problems) -> None:
    assert problems(*overrides) == [f"small.yaml: {line}"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.group_size=1", "algorithm={name: ppo}"),
        ("rollout.group_size=1", "algorithm={name: grpo, baseline: batch, scale: none}"),
        ("rollout.group_size=1", "algorithm={name: sft}", "rewards={}"),
        ("rollout.group_size=2",),
        ("rewards={ocr: {weight: 0}, preservation: {weight: 0.5}}",),
        ("algorithm.sft_steps=10", "training.max_steps=10"),
        ("evaluation.weights=ema", "ema={}"),
        ("logging.sinks=[trackio]", "logging.group=first", "logging.project=signs"),
        ("rollout={num_steps: 4, window: {size: 2, range: [0, 0.5]}}",),
        ("rollout={step_rule: cps, window: {size: 1, range: [0.8, 1.0]}}",),
        ("rollout={step_rule: cps, num_steps: 2, noise_level: 1.0}",),
        ("rewards.ocr={url: auto, detect: false}",),
        ("rewards.ocr={url: 'http://a:1', weight: 2, paste_back: false}",),
        ("data.resolution=[8, 16]",),
        ("data.reference=mask_box", "rewards={style: {}}"),
        ("data.reference=mask_box", "data.reference_strip=16"),
        ("data.reference_strip=16", "data.reference_strip_fit=full_width"),
        (
            "data={format: self_bench, path: x, resolution: 64, reference: half_box}",
            "algorithm={name: sft}",
            "model.train={kind: ip_adapter}",
            "evaluation.data={format: cross_bench, path: x, resolution: 64}",
        ),
        (
            "warmup_data={format: self_bench, path: x, resolution: 64, reference: half_box}",
            "algorithm.sft_steps=1",
            "model.train={kind: ip_adapter}",
        ),
        ("model={family: qwen_image}", "data={format: prompts, path: x.txt, resolution: 64}"),
        ("model.path=someone/FLUX", "data.resolution=[512, 768]"),
    ],
    ids=" ".join,
)
def test_its_neighbour_that_works(overrides: tuple[str, ...], run_with: RunWith) -> None:
    assert run_with(*overrides).name == "small"


LOW = [("fp16", "no", "fp16"), ("fp16", "bf16", "bf16"), ("bf16", "fp16", "fp16")]
"""`model.dtype`, `training.mixed_precision`, and the dtype to set."""


@pytest.mark.parametrize(("dtype", "precision", "remedy"), LOW)
def test_frozen_weights_in_another_low_precision_than_autocast(
    dtype: str, precision: str, remedy: str, run_with: RunWith
) -> None:
    """Small gradients of an fp16 network underflow to 0 without a loss scaler; torch's autocast refuses the other of
    fp16 and bf16. Weights that are all trained are fp32. An older run goes on as it began, with a warning."""
    given = f"model.dtype={dtype}", f"training.mixed_precision='{precision}'"
    problem = f"training.mixed_precision: given '{precision}', but model.dtype is {dtype}"
    with pytest.raises(ConfigError, match=problem):
        require_trainable(run_with(*given))
    resumed = run_with(*given, "resume=auto")
    require_trainable(resumed)
    assert [problem in line for line in warnings_of(resumed)].count(True) == 1
    require_trainable(run_with(*given, "model.train={kind: full}"))
    require_trainable(run_with(f"model.dtype={remedy}", f"training.mixed_precision={remedy}"))
    require_trainable(run_with("model.dtype=fp32", "training.mixed_precision='no'"))  # docs/troubleshooting.md


def test_ppo_is_grpo_on_the_whole_batch(run_with: RunWith) -> None:
    grpo, ppo = run_with().algorithm, run_with("algorithm={name: ppo}").algorithm
    changed = {name for name in type(grpo).model_fields if getattr(grpo, name) != getattr(ppo, name)}
    assert changed == {"name", "baseline", "scale", "skip_zero_std_groups"}
    assert (ppo.baseline, ppo.scale) == ("batch", "batch")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("algorithm", "skips"),
    [
        ("{name: grpo}", True),
        ("{name: grpo, baseline: batch}", False),
        ("{name: ppo}", False),
        ("{name: ppo, baseline: group}", True),
        ("{name: nft}", True),
        ("{name: nft, baseline: batch, skip_zero_std_groups: null}", False),
        ("{name: nft, skip_zero_std_groups: false}", False),
    ],
)
def test_groups_without_a_signal_are_left_out_where_groups_are_compared(
    algorithm: str, skips: bool, run_with: RunWith
) -> None:
    assert run_with(f"algorithm={algorithm}").algorithm.skip_zero_std_groups is skips  # type: ignore[union-attr]
