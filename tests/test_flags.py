"""Flags of the usual fine-tuning scripts behind `retouch train`: the answer ends with a line that works."""

from __future__ import annotations

import itertools
import shlex
from functools import cache
from pathlib import Path

import pytest

from retouch.cli import flags
from retouch.cli.flags import KEYS, answer
from retouch.config import parse_run
from retouch.config.check import require_trainable
from retouch.config.load import read_yaml
from retouch.config.published import resolved
from retouch.families import FAMILIES
from retouch.families.base import SHORT_NAMES
from tests.command_line import retouch
from tests.docs.test_coming_from import ROWS

REPOSITORY = Path(__file__).parents[1]

MINIMAL = (
    "--model_type flux --pretrained_model_name_or_path tiny --siglip_path tiny --train_data_json data.json "
    "--output_dir out --resolution 512 --train_batch_size 1 --max_train_steps 1000 --use_rl --rl_method grpo"
)
PRODUCTION = (
    "--model_type=flux --pretrained_model_name_or_path=tiny --siglip_path=tiny --train_data_json=data.json "
    "--use_rl --rl_method={method} --rl_warmup_steps=1000 --rl_num_images_per_prompt 4 --rl_num_batches_per_epoch 2 "
    "--rl_num_inference_steps 50 --rl_guidance_scale 3.5 --rl_timestep_fraction 1.0 --rl_num_inner_epochs 1 "
    "--rl_adv_clip_max 5 --rl_per_prompt_stat_tracking --use_ema --ema_decay 0.9999 --ema_update_interval 1 "
    "--rl_grpo_clip_range 0.2 --rl_kl_beta 0.1 --nft_beta 0.5 --nft_adv_mode normal --nft_decay_type 1 "
    "--learning_rate 1e-4 --gradient_accumulation_steps 4 --gradient_checkpointing --mixed_precision bf16 "
    "--offload_text_encoder_two --checkpointing_steps 500 --report_to tensorboard"
)
LINES = {
    MINIMAL: [
        *("example:flux_fill_ip_grpo", "model.path=tiny", "model.train.image_encoder=tiny"),
        *("rewards.style.image_encoder=tiny", "data.format=manifest", "data.path=data.json"),
        *("data.reference=mask_box", "logging.dir=out", "data.resolution=512"),
        *("optimizer.batch_size_per_device=1", "training.max_steps=1000"),
    ],
    "--model_type qwen --train_data_json data.json": [
        *("example:qwen_image_sft", "data.format=manifest", "data.path=data.json"),
    ],
    "--model_type flux --use_rl --train_data_json l.json --ocr_weight 0.3 --vlm_weight 0.7": [
        *("example:flux_fill_manifest_grpo", "data.path=l.json", "rewards.ocr={weight: 0.3}"),
        "rewards.vlm={weight: 0.7}",
    ],
    "--siglip_path s --use_rl --ocr_weight 0.3 --vlm_weight 0.7": [
        *("example:flux_fill_ip_vlm_ocr_grpo", "model.train.image_encoder=s", "rewards.ocr.weight=0.3"),
        "rewards.vlm.weight=0.7",
    ],
    "mine.yaml --use_rl --rl_method nft --nft-beta 0.3 data.limit=8 --report_to none": [
        *("mine.yaml", "algorithm.name=nft", "algorithm.mix=0.3", "logging.sinks=[]", "data.limit=8"),
    ],
    "--use_rl FALSE --use_ema=False --resume_from_checkpoint latest": [
        *("example:flux_fill_sft", "ema=null", "resume=auto"),
    ],
    "--model_type sdxl --max_train_steps 3": ["RUN.yaml", "model.family=sdxl", "training.max_steps=3"],
    "--model_type flux --train_data_json x.json --use_rl --rl_method ppo": [
        *("example:flux_fill_manifest_grpo", "algorithm.name=ppo", "data.path=x.json"),
    ],
    "--siglip_path s --rl_method dpo": [
        *("example:flux_fill_ip_grpo", "algorithm.name=dpo", "model.train.image_encoder=s"),
        "rewards.style.image_encoder=s",
    ],
    "--model_type qwen --rl_method ppo": ["example:qwen_image_grpo", "algorithm.name=ppo"],
    "--model_type sd3 --siglip_path s --rl_method nft": [
        *("RUN.yaml", "algorithm.name=nft", "model.family=sd3", "model.train.image_encoder=s"),
    ],
    "--rl_method kto --model_type sd3": ["RUN.yaml", "algorithm.name=kto", "model.family=sd3"],
    "--learning_rate 1e-4 --use_8bit_adam run.yaml": ["run.yaml", "optimizer.lr=1e-4"],
    "mine.yaml --rl_kl_beta 0.1 --nft_beta 0.5": ["mine.yaml", "algorithm.kl_weight=0.1", "algorithm.mix=0.5"],
    "--rl_kl_beta 0.1": ["example:flux_fill_sft"],
}
DATA = ("", "--train_data_json x.json", "--siglip_path s", "--siglip_path s --train_data_json x.json",
        "--initial_ip_adapter_path a.bin")  # fmt: skip
REWARDS = ("", "--ocr_weight 0.4 --vlm_weight 0.6")


def line_of(typed: str) -> list[str]:
    message = answer("train", shlex.split(typed))
    assert message is not None
    words = shlex.split(message.rpartition("; type\n")[2])
    assert words[:2] == ["retouch", "train"]
    return words[2:]


@pytest.mark.parametrize("typed", LINES)
def test_the_line_to_type(typed: str) -> None:
    assert line_of(typed) == LINES[typed]


@pytest.mark.parametrize(
    "typed", ["mine.yaml --use_ema", "mine.yaml --use_ema true", "mine.yaml --use_ema --ema_decay 0.99"]
)
def test_no_flag_for_a_run_file_of_ones_own_is_dropped(typed: str) -> None:
    message = answer("train", typed.split())
    assert message is not None and ("ema.decay=0.99" in message)
    assert ("the section ema of mine.yaml" in message) == ("--ema_decay" not in typed)


@pytest.mark.parametrize("typed", [MINIMAL, *(PRODUCTION.format(method=name) for name in ("grpo", "nft"))])
def test_the_line_of_the_guides_is_accepted(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `check`: the file is there, every key exists, and they go together."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("DATA_PATH", raising=False)
    refused = retouch("train", *shlex.split(typed))
    assert refused.code == 2 and refused.err.startswith("error: --model_type: a flag of the fine-tuning scripts; ")
    line = shlex.split(refused.err.rpartition("; type\n")[2])
    outcome = retouch("check", *line[2:])
    assert outcome.code == 0, outcome.err
    assert ("does not read --nft_beta" in refused.err) == ("--rl_method=grpo" in typed)
    assert ("nft does not read --rl_timestep_fraction, --rl_grpo_clip_range" in refused.err) == (
        "--rl_method=nft" in typed
    )


@pytest.mark.parametrize("model", [*FAMILIES, *SHORT_NAMES])
def test_every_line_is_of_a_file_that_is_there_and_accepted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every algorithm, data, adapter and reward: only RUN.yaml, where no file fits, is left to the reader."""
    for name in ("MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH", "IMAGE_ROOT", "EVAL_DATA_PATH", "ADAPTER_PATH"):
        monkeypatch.setenv(name, "somewhere")
    read, tried = cache(read_yaml), set[tuple[str, ...]]()
    for method, data, rewards in itertools.product(("", *flags._SWITCHED), DATA, REWARDS):  # pyright: ignore[reportPrivateUsage]
        line = line_of(f"--model_type {model} {f'--use_rl --rl_method {method}' if method else ''} {data} {rewards}")
        if line[0] != "RUN.yaml" and tuple(line) not in tried:
            run = parse_run(read(resolved(line[0])), line[1:], source=shlex.join(line))
            require_trainable(run)
            assert (run.algorithm.name, run.model.family) == (method or "sft", SHORT_NAMES.get(model, model))
            assert (run.model.train.kind == "ip_adapter") == ("_path" in data)
        tried.add(tuple(line))
    assert len({line for line in tried if line[0] != "RUN.yaml"}) >= 10


def test_every_family_has_published_files() -> None:
    assert all("grpo" in flags.published_algorithms(family) for family in FAMILIES)
    assert flags.published_algorithms("flux_fill_ip_vlm_ocr") == ["grpo"] and not flags.published_algorithms("flux")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "check run.yaml --memory --world-size 4 --learning_rate 1e-4 --accelerate a=b.yaml --json --trust",
            "check run.yaml optimizer.lr=1e-4 --memory --world-size 4 --accelerate a=b.yaml --json --trust",
        ),
        ("check --world-size=4 --use_rl a.yaml", "check a.yaml algorithm.name=grpo --world-size=4"),
        ("train a.yaml --verbose --learning_rate 1", "train a.yaml optimizer.lr=1 --verbose"),
        ("train a.yaml -v --learning_rate 1 --world-size", "train a.yaml optimizer.lr=1 -v"),
    ],
)
def test_own_options_stay_in_the_line(typed: str, line: str) -> None:
    command, *words = shlex.split(typed)
    message = answer(command, words)
    assert message is not None and message.rpartition("; type\n  retouch ")[2] == line


def test_the_flags_are_those_of_the_page() -> None:
    assert {f"--{flag}": key for flag, key in KEYS.items()} == {
        flag: key for flag, key in ROWS if flag.startswith("--")
    }


@pytest.mark.parametrize("other", ["tiny/flux_two_texts --rl_method nft", "tiny/qwen_image_edit --rl_method vlm_grpo"])
def test_files_without_one_of_grpo_are_no_kind(other: str) -> None:
    """Their rewards are read from it."""
    message = answer("train", ["--model_type", *other.split(), "--ocr_weight", "0.5", "--vlm_weight", "0.5"])
    assert message is not None and " RUN.yaml " in message


def test_unknown_flags_beside_known_ones_are_named() -> None:
    message = answer("train", ["--model_type", "flux", "--adam_beta1", "0.9", "--use_8bit_adam"])
    assert message is not None and "; without a key: --adam_beta1, --use_8bit_adam); type" in message


@pytest.mark.parametrize(
    "typed", ["run.yaml --verbose", "--help", "run.yaml --memory --world-size 4", "run.yaml a.b=--c"]
)
def test_own_options_are_no_flags_of_scripts(typed: str) -> None:
    assert answer("check", shlex.split(typed)) is None


def test_the_help_says_where_the_keys_are() -> None:
    told = " ".join(retouch("train", "--help").out.split())
    assert "Keys are in docs/configuration.md" in told and "docs/coming-from.md" in told
