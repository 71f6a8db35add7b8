"""Every constraint of schema.py and rules.py has one bad example and its message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from retouch.config import RunConfig

from .data_bounds import DATA_ELEMENTS
from .leaves import leaves
from .reward_bounds import REWARD_BOUNDS

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

# one row a constraint: key, value as written, value as shown, what the message says
BOUNDS = [
    ("name", "'a b'", "'a b'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("name", "-a", "'-a'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("seed", "-1", "-1", NOT_NEGATIVE),
    ("seed", "2147483648", "2147483648", "input should be less than 2147483648"),
    ("seed", "1.5", "1.5", "input should be a valid integer, got a number with a fractional part"),
    ("model.dtype", "fp64", "'fp64'", "input should be 'fp32', 'bf16' or 'fp16'"),
    ("model.vae_batch", "2", "2", "input should be 'all', 'one' or 'tiles'"),
    ("model.max_sequence_length", "0", "0", "input should be greater than or equal to 1"),
    ("model.max_sequence_length", "513", "513", "input should be less than or equal to 512"),
    ("data.fit", "pad", "'pad'", "input should be 'crop' or 'stretch'"),
    ("data.reference", "crop", "'crop'", "input should be 'given', 'mask_box' or 'half_box'"),
    ("data.reference_strip", "0", "0", POSITIVE),
    ("data.reference_strip_fit", "cover", "'cover'", "input should be 'contain' or 'full_width'"),
    ("data.target", "file", "'file'", "input should be 'auto', 'source' or 'none'"),
    ("data.max_bad_items", "-1", "-1", NOT_NEGATIVE),
    ("data.limit", "0", "0", POSITIVE),
    ("data.resolution", "big", "'big'", A_SIZE),
    ("data.resolution", "0", "0", A_SIZE),
    ("data.resolution", "[64]", "[64]", A_SIZE),
    ("data.resolution", "[64, -64]", "[64, -64]", A_SIZE),
    ("data.prompt_template", "'Write it'", "'Write it'", "it must contain {text}, the place of the text to write"),
    ("rollout.group_size", "0", "0", POSITIVE),
    ("rollout.global_groups_per_batch", "0", "0", POSITIVE),
    ("rollout.batches_per_epoch", "0", "0", POSITIVE),
    ("rollout.batch_size_per_device", "0", "0", POSITIVE),
    ("rollout.preset", "slow", "'slow'", "input should be 'reference' or 'fast'"),
    ("rollout.num_steps", "0", "0", POSITIVE),
    ("rollout.guidance_scale", "-1", "-1", NOT_NEGATIVE),
    ("rollout.guidance_scale", ".inf", "inf", FINITE),
    ("rollout.step_rule", "ddpm", "'ddpm'", "input should be 'flow_sde', 'dance_sde', 'cps' or 'ddim'"),
    ("rollout.noise_level", "0", "0", POSITIVE),
    ("rollout.eta", "0", "0", POSITIVE),
    ("algorithm.warmup_steps", "-1", "-1", NOT_NEGATIVE),
    ("algorithm.inner_epochs", "0", "0", POSITIVE),
    ("algorithm.clip_range", "0", "0", POSITIVE),
    ("algorithm.advantage_clip", "0", "0", POSITIVE),
    ("algorithm.baseline", "none", "'none'", "input should be 'group' or 'batch'"),
    ("algorithm.scale", "std", "'std'", "input should be 'group', 'batch' or 'none'"),
    ("algorithm.combine", "sum", "'sum'", "input should be 'normalize_then_sum' or 'sum_then_normalize'"),
    ("algorithm.kl_weight", "-1", "-1", NOT_NEGATIVE),
    ("algorithm.kl_mode", "full", "'full'", "input should be 'exact' or 'published'"),
    ("algorithm.old_log_probs", "kept", "'kept'", "input should be 'recorded' or 'recomputed'"),
    ("algorithm.timestep_fraction", "0", "0", POSITIVE),
    ("algorithm.timestep_fraction", "1.5", "1.5", AT_MOST_1),
    ("algorithm.region", "hole", "'hole'", "input should be 'all' or 'mask'"),
    ("algorithm.region_dilation", "-1", "-1", NOT_NEGATIVE),
    ("algorithm.seam_weight", "0", "0", POSITIVE),
    ("algorithm.caption_dropout", "1.5", "1.5", AT_MOST_1),
    ("algorithm.resample_rounds", "-1", "-1", NOT_NEGATIVE),
    ("algorithm.log_prob_mode", "sum", "'sum'", "input should be 'exact' or 'published'"),
    ("rewards.ocr.weight", ".nan", "nan", FINITE),
    ("rewards.ocr.score", "cer", "'cer'", "input should be 'ned' or 'confidence'"),
    ("rewards.ocr.crop_margin", "-0.1", "-0.1", NOT_NEGATIVE),
    ("rewards.ocr.threads", "-1", "-1", NOT_NEGATIVE),
    ("rewards.ocr.url", "5", "5", AN_ADDRESS),
    ("rewards.ocr.url", "''", "''", AN_ADDRESS),
    ("rewards.ocr.url", "[]", "[]", AN_ADDRESS),
    ("rewards.ocr.url", "[auto, '']", "['auto', '']", AN_ADDRESS),
    ("reward_client.timeout_s", "0", "0", POSITIVE),
    ("reward_client.outage_wait_s", "-1", "-1", NOT_NEGATIVE),
    ("reward_client.max_failure_rate", "1.1", "1.1", AT_MOST_1),
    ("reward_client.batch_size", "0", "0", POSITIVE),
    ("optimizer.lr", "0", "0", POSITIVE),
    ("optimizer.lr", ".inf", "inf", FINITE),
    ("optimizer.lr", "1e-4x", "'1e-4x'", "input should be a valid number, unable to parse string as a number"),
    ("optimizer.warmup_lr", "0", "0", POSITIVE),
    ("optimizer.weight_decay", "-1", "-1", NOT_NEGATIVE),
    ("optimizer.eps", "0", "0", POSITIVE),
    ("optimizer.schedule", "step", "'step'", "input should be 'constant', 'linear' or 'cosine'"),
    ("optimizer.ramp_steps", "-1", "-1", NOT_NEGATIVE),
    ("optimizer.batch_size_per_device", "0", "0", POSITIVE),
    ("optimizer.gradient_accumulation", "0", "0", POSITIVE),
    ("optimizer.steps_per_forward", "0", "0", POSITIVE),
    ("optimizer.max_grad_norm", "0", "0", POSITIVE),
    ("optimizer.on_out_of_memory", "skip", "'skip'", "input should be 'halve' or 'stop'"),
    ("rollout.solver", "heun", "'heun'", "input should be 'first_order' or 'dpm2'"),
    ("optimizer.moments", "fp8", "'fp8'", "input should be 'fp32' or 'int8'"),
    ("ema.decay", "1", "1", "input should be less than 1"),
    ("ema.decay", "0", "0", POSITIVE),
    ("ema.update_interval", "0", "0", POSITIVE),
    ("training.max_steps", "0", "0", POSITIVE),
    ("training.max_minutes", "0", "0", POSITIVE),
    ("training.checkpoint_every", "-1", "-1", NOT_NEGATIVE),
    ("training.keep_checkpoints", "0", "0", POSITIVE),
    ("training.eval_every", "-1", "-1", NOT_NEGATIVE),
    ("training.mixed_precision", "tf32", "'tf32'", "input should be 'no', 'bf16' or 'fp16'"),
    ("training.gradient_checkpointing", "ys", "'ys'", "input should be a valid boolean, unable to interpret input"),
    ("training.sharding", "zero1", "'zero1'", "input should be 'none', 'fsdp2', 'zero2' or 'zero3'"),
    ("evaluation.num_examples", "0", "0", POSITIVE),
    ("evaluation.images_per_example", "0", "0", POSITIVE),
    ("evaluation.num_steps", "0", "0", POSITIVE),
    ("evaluation.weights", "best", "'best'", "input should be 'ema' or 'raw'"),
    ("evaluation.grid_examples", "-1", "-1", NOT_NEGATIVE),
    ("logging.rollout_images_every", "-1", "-1", NOT_NEGATIVE),
    ("logging.project", "a/b", "'a/b'", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    ("logging.group", "''", "''", "string should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
    *REWARD_BOUNDS,
]
ELEMENTS = [
    ("optimizer.betas", "[0.9, 1.0]", "optimizer.betas.1: given 1.0; input should be less than 1"),
    ("optimizer.betas", "[0.9]", "optimizer.betas.1: required and not set"),
    (
        "logging.sinks",
        "[mlflow]",
        "logging.sinks.0: given 'mlflow'; input should be 'tensorboard', 'wandb' or 'trackio'",
    ),
    (
        "model",
        "{family: qwen_image, distillation_lora: {path: ''}}",
        "model.distillation_lora.path: given ''; string should have at least 1 character",
    ),
    (
        "model",
        "{family: qwen_image, distillation_lora: {path: a, scale: 0}}",
        f"model.distillation_lora.scale: given 0; {POSITIVE}",
    ),
    (
        "model",
        "{family: qwen_image, distillation_lora: {path: a, shift: 0}}",
        f"model.distillation_lora.shift: given 0; {POSITIVE}",
    ),
    ("rollout.window", "{range: [0, 2]}", f"rollout.window.range.1: given 2; {AT_MOST_1}"),
    ("rollout.window", "{size: 0}", f"rollout.window.size: given 0; {POSITIVE}"),
    (
        "rollout.window",
        "{position: last}",
        "rollout.window.position: given 'last'; input should be 'random', 'fixed' or 'sliding'",
    ),
    ("rollout.window", "{stride: 0}", f"rollout.window.stride: given 0; {POSITIVE}"),
    ("rollout.window", "{batches_per_position: 0}", f"rollout.window.batches_per_position: given 0; {POSITIVE}"),
    ("algorithm", "{name: dpo, beta: 0}", f"algorithm.beta: given 0; {POSITIVE}"),
    (
        "algorithm",
        "{name: dpo, pairs: both}",
        "algorithm.pairs: given 'both'; input should be 'online' or 'offline'",
    ),
    (
        "algorithm",
        "{name: dpo, rollout_policy: old}",
        "algorithm.rollout_policy: given 'old'; input should be 'current' or 'reference'",
    ),
    (
        "algorithm",
        "{name: dpo, reference_refresh_every: -1}",
        f"algorithm.reference_refresh_every: given -1; {NOT_NEGATIVE}",
    ),
    ("algorithm", "{name: dpo, timesteps_per_pair: 0}", f"algorithm.timesteps_per_pair: given 0; {POSITIVE}"),
    ("algorithm", "{name: nft, mix: 0}", f"algorithm.mix: given 0; {POSITIVE}"),
    ("algorithm", "{name: nft, mix: 1.5}", f"algorithm.mix: given 1.5; {AT_MOST_1}"),
    (
        "algorithm",
        "{name: nft, mode: sign}",
        (
            "algorithm.mode: given 'sign'; input should be 'normal', 'positive_only', 'negative_only', 'one_only' or "
            "'binary'"
        ),
    ),
    *(
        (
            "algorithm",
            f"{{name: nft, old_policy: {written}}}",
            f"algorithm.old_policy: given {shown}; input should be 'copy', 'frozen', 'ramp_half' or 'ramp_full'",
        )
        # 0, 1 and 2 have a name; true is not 1, nor is 1.0 or '1'
        for written, shown in (("3", "3"), ("-1", "-1"), ("true", "True"), ("1.0", "1.0"), ("'1'", "'1'"))
    ),
    ("algorithm", "{name: nft, timesteps_per_image: 0}", f"algorithm.timesteps_per_image: given 0; {POSITIVE}"),
    (
        "model",
        "{family: qwen_image_edit, variant: edit_max}",
        "model.variant: given 'edit_max'; input should be 'edit' or 'edit_plus'",
    ),
    (
        "model",
        "{family: qwen_image_edit, max_sequence_length: 2049}",
        "model.max_sequence_length: given 2049; input should be less than or equal to 2048",
    ),
    (
        "model",
        "{family: qwen_image_edit, vision_pixels: 100}",
        "model.vision_pixels: given 100; input should be greater than or equal to 1024",
    ),
    (
        "model",
        "{family: qwen_image_edit, path: Qwen/Qwen-Image-Edit-2509}",
        "model.path: given 'Qwen/Qwen-Image-Edit-2509', but model.variant is 'edit'; set Qwen/Qwen-Image-Edit",
    ),
    ("model.train", "{kind: lora, rank: 0}", f"model.train.rank: given 0; {POSITIVE}"),
    ("model.train", "{kind: lora, alpha: 0}", f"model.train.alpha: given 0; {POSITIVE}"),
    (
        "model.train",
        "{kind: lora, targets: []}",
        "model.train.targets: given []; list should have at least 1 item after validation, not 0",
    ),
    ("rewards", "{style: {gate: 2}}", f"rewards.style.gate: given 2; {AT_MOST_1}"),
    (
        "rewards",
        "{style: {image_encoder: ''}}",
        "rewards.style.image_encoder: given ''; string should have at least 1 character",
    ),
    ("model.train", "{kind: ip_adapter, tokens: 0}", f"model.train.tokens: given 0; {POSITIVE}"),
    (
        "model.train",
        "{kind: ip_adapter, weights: k}",
        "model.train.weights: given 'k'; input should be 'all', 'no_last_layer', 'kv' or 'kv_lora'",
    ),
    (
        "model.train",
        "{kind: ip_adapter, reference_dropout: 1.5}",
        f"model.train.reference_dropout: given 1.5; {AT_MOST_1}",
    ),
    (
        "model.train",
        "{kind: ip_adapter, scale: [1, -1]}",
        ("model.train.scale: given [1, -1]; write a factor of 0 or more, like 1.0, or a list with one for each block"),
    ),
    *DATA_ELEMENTS,
    *(
        ("algorithm", f"{{name: vlm_grpo, {key}: {written}}}", f"algorithm.{key}: given {shown}; {says}")
        for key, written, shown, says in (
            ("conditioning", "prompt", "'prompt'", "input should be 'response_states' or 'rewrite_text'"),
            ("negative_encoder", "none", "'none'", "input should be 'base' or 'policy'"),
            ("images_per_completion", "0", "0", POSITIVE),
            ("on_overflow", "cut", "'cut'", "input should be 'error' or 'truncate'"),
        )
    ),
    ("rewards", "{completion_quality: {min_words: 0}}", f"rewards.completion_quality.min_words: given 0; {POSITIVE}"),
    ("rewards", "{completion_quality: {max_words: 0}}", f"rewards.completion_quality.max_words: given 0; {POSITIVE}"),
]


@pytest.mark.parametrize(("key", "written", "shown", "says"), BOUNDS)
def test_a_value_out_of_bounds(key: str, written: str, shown: str, says: str, problems: Problems) -> None:
    assert problems(f"{key}={written}") == [f"small.yaml: {key}: given {shown}; {says}"]


@pytest.mark.parametrize(("key", "written", "line"), ELEMENTS)
def test_a_value_inside_a_list_or_section(key: str, written: str, line: str, problems: Problems) -> None:
    assert problems(f"{key}={written}") == [f"small.yaml: {line}"]


def test_every_bounded_option_has_a_bad_example_here() -> None:
    shown = [row[0] for row in BOUNDS] + [line.partition(": ")[0] for _, _, line in ELEMENTS]
    tried = {re.sub(r"^rewards\.\w+", "rewards.*", re.sub(r"\.\d+$", "", key)) for key in shown}
    bounded = {leaf.key for leaf in leaves(RunConfig) if leaf.info.metadata or "Literal" in str(leaf.info.annotation)}
    tags = {"model.family", "model.train.kind", "data.format", "algorithm.name", "rewards.*.scorer"}
    same_class = ("warmup_data.", "evaluation.data.")  # sections of the class of `data`
    assert {key for key in bounded - tags if not key.startswith(same_class)} - tried == set()


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
            "rewards: every weight is 0, so that there is nothing to raise; set one weight above 0",
        ),
        (
            ("rollout.group_size=1",),
            (
                "rollout.group_size: given 1, but algorithm.baseline=group compares the images of one example with "
                "each other; set group_size to 2 or more (4-16 is usual), or algorithm.baseline=batch"
            ),
        ),
        (
            ("rollout.group_size=1", "algorithm={name: ppo, scale: group}"),
            (
                "rollout.group_size: given 1, but algorithm.scale=group compares the images of one example with each "
                "other; set group_size to 2 or more (4-16 is usual), or algorithm.scale=batch"
            ),
        ),
        (
            ("algorithm.warmup_steps=11", "training.max_steps=10"),
            "algorithm.warmup_steps: given 11, more than training.max_steps 10; max_steps counts the warm-up too",
        ),
        (
            ("algorithm.timestep_fraction=0.5", "rollout.window={size: 2}"),
            (
                "algorithm.timestep_fraction: given 0.5 beside rollout.window; the window already says which steps are "
                "trained; leave timestep_fraction at 1.0"
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
            ("training.sharding=fsdp2", "optimizer.moments=int8"),
            (
                "optimizer.moments: given 'int8' beside training.sharding=fsdp2, which shards them already, in fp32; "
                "set moments=fp32"
            ),
        ),
        (
            ("algorithm={name: dpo}", "rollout.preset=fast"),
            (
                "rollout.preset: given 'fast', but presets are of grpo, ppo, nft, and algorithm.name is dpo; leave "
                "preset out, and set rollout.num_steps and guidance_scale"
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
                "rollout.num_steps: given 1, but step_rule cps draws no noise in the last step; set num_steps to 2 or "
                "more, or another step_rule"
            ),
        ),
        (
            ("rollout={step_rule: cps, noise_level: 1.2}",),
            (
                "rollout.noise_level: given 1.2, but for step_rule cps it is a share in (0, 1]; set 0.8, as published, "
                "or another step_rule"
            ),
        ),
        (
            ("rewards.ocr={url: 'http://a:1', detect: false}",),
            (
                "rewards.ocr.detect is set beside url 'http://a:1', but the options of a reward belong to the server "
                "that scores it; drop detect here and start the server with it"
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
                "data.reference: given 'half_box', which repaints half of a text, so that no reward can read it; set "
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
        ("algorithm.warmup_steps=10", "training.max_steps=10"),
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
            "algorithm.warmup_steps=1",
            "model.train={kind: ip_adapter}",
        ),
        ("model={family: qwen_image}", "data={format: prompts, path: x.txt, resolution: 64}"),
        ("model.path=someone/FLUX", "data.resolution=[512, 768]"),
    ],
    ids=" ".join,
)
def test_its_neighbour_that_works(overrides: tuple[str, ...], run_with: RunWith) -> None:
    assert run_with(*overrides).name == "small"


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
