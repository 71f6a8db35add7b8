"""Combinations that cannot work, refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.config.needs import data_sections, seen_tokens
from retouch.config.reward_rules import check_entries
from retouch.families.facts import ADAPTERS, EDIT_CHAT_TOKENS, FACTS
from retouch.families.sections import QwenImageEditModel, TrainIpAdapter

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


def check(run: RunConfig) -> None:
    """Refuse what a section cannot do in this run, and what two sections cannot do together.

    Raises:
        ValueError: "key: given ...; expected ...; set ...".
    """
    _model(run)
    run.model.check(run, "model")
    check_entries(run)
    for name, entry in run.rewards.items():
        entry.check(run, f"rewards.{name}")
    _rewards(run)
    _logging(run)
    run.algorithm.check(run, "algorithm")
    _adapter(run)
    for key, section in data_sections(run).items():
        section.check(run, key)
        if isinstance(run.model, QwenImageEditModel):
            _shows_the_image(run.model, key, section.size)
    _weights(run)
    _sharding(run)


def _shows_the_image(model: QwenImageEditModel, key: str, size: tuple[int, int]) -> None:
    taken = seen_tokens(model, size) + EDIT_CHAT_TOKENS
    if taken >= model.max_sequence_length:
        raise ValueError(
            f"model.max_sequence_length: given {model.max_sequence_length}, but a picture of {key}.resolution "
            f"{size[0]} x {size[1]} takes {taken} tokens of it with the chat around it, which leaves none for a "
            f"prompt; set {taken + 256} or more, or a smaller model.vision_pixels"
        )


def _model(run: RunConfig) -> None:
    if not run.model.path:
        raise ValueError("model.path: empty; set a hub id or a folder in the diffusers layout")
    if FACTS[run.model.family].edits and run.model.free_text_encoders:
        raise ValueError(
            f"model.free_text_encoders: given true, but what the text encoder of {run.model.family} reads depends on "
            "the picture, so that it is needed all along; set offload_text_encoders=true"
        )
    if FACTS[run.model.family].edits and run.model.embeddings is not None:
        raise ValueError(
            f"model.embeddings: given {run.model.embeddings!r}, but what the text encoder of {run.model.family} reads "
            "depends on the picture, and embeddings are kept by the prompt; leave it out"
        )


def _adapter(run: RunConfig) -> None:
    train = run.model.train
    if not isinstance(train, TrainIpAdapter):
        return
    if run.model.family not in ADAPTERS:
        raise ValueError(
            f"model.train.kind: given 'ip_adapter', which is for {', '.join(ADAPTERS)}; set kind=lora for "
            f"{run.model.family}"
        )
    if ADAPTERS[run.model.family].head == "linear":
        for key, value in (("query_former", train.query_former), ("weights", train.weights == "no_last_layer")):
            if value:
                raise ValueError(
                    f"model.train.{key}: given {getattr(train, key)!r}, but the projection of {run.model.family} is "
                    f"one layer; leave {key} out"
                )
        if train.value_norm:
            raise ValueError(
                f"model.train.value_norm: given true, but {run.model.family} uses the attention of diffusers, which "
                "does not normalize values; leave value_norm out"
            )
    defaults = TrainIpAdapter()
    if train.weights != "kv_lora" and (train.rank, train.alpha) != (defaults.rank, defaults.alpha):
        raise ValueError(
            f"model.train.rank: rank and alpha are of weights=kv_lora, but weights is {train.weights!r}; leave them "
            "out, or set weights=kv_lora"
        )
    if train.reference_dropout and not run.algorithm.supervised_steps(run):
        raise ValueError(
            f"model.train.reference_dropout: given {train.reference_dropout}, but the run has no supervised steps; "
            "leave it out, or set algorithm.sft_steps"
        )


def _logging(run: RunConfig) -> None:
    if {"wandb", "trackio"} & {*run.logging.sinks}:
        return
    for key in ("project", "group"):
        given = getattr(run.logging, key)
        if given != type(run.logging).model_fields[key].default:
            raise ValueError(
                f"logging.{key}: given {given!r}, which wandb and trackio read, but logging.sinks is "
                f"{run.logging.sinks}; add one of them, or leave {key} out"
            )


def _rewards(run: RunConfig) -> None:
    if not run.algorithm.trains_on_rewards:
        return
    if not run.rewards:
        raise ValueError(
            f"rewards: none given, but algorithm.name is {run.algorithm.name!r}, which trains on rewards; "
            "set for example rewards: {ocr: {weight: 1.0}}"
        )
    trained = [entry for entry in run.rewards.values() if entry.role == "train"]
    if not trained:
        raise ValueError("rewards: every role is gold, so that there is nothing to raise; add one of role train")
    if not any(entry.weight for entry in trained):
        raise ValueError("rewards: every weight is 0, so that there is nothing to raise; set one weight above 0")
    if not any(entry.weight > 0 for entry in trained):
        raise ValueError(
            "rewards: no weight is above 0, so that training would lower what the rewards say; set one weight above 0"
        )


def _weights(run: RunConfig) -> None:
    if run.evaluation.weights == "ema" and run.ema is None:
        raise ValueError(
            "evaluation.weights: given 'ema', but there is no ema section; set ema.decay=0.999, or "
            "evaluation.weights=raw"
        )


def _sharding(run: RunConfig) -> None:
    training = run.training
    if training.sharding == "none":
        if not training.shard_gradients:
            useful = "zero2" if run.model.train.kind == "ip_adapter" else "fsdp2"
            raise ValueError(
                "training.shard_gradients: given false, but training.sharding is none; leave it out, or set "
                f"sharding={useful}"
            )
        return
    if training.compile:
        raise ValueError(
            f"training.compile: given true beside training.sharding={training.sharding}, which has hooks in each "
            "block; set compile=false"
        )
    if run.optimizer.state == "8bit":
        raise ValueError(
            f"optimizer.state: given '8bit' beside training.sharding={training.sharding}, which shards them already, "
            "in fp32; set state=fp32"
        )
    if run.model.train.kind == "ip_adapter" and training.sharding != "zero2":
        raise ValueError(
            f"training.sharding: given {training.sharding!r}, but the files of a style adapter need its frozen weights "
            "whole; set sharding=zero2, or none"
        )
    if training.mixed_precision == "fp16":
        raise ValueError(
            "training.mixed_precision: given 'fp16', whose loss scaler would see only its own piece of the gradients "
            f"under training.sharding={training.sharding}; set bf16"
        )
    if training.sharding == "zero3" and not training.shard_gradients:
        raise ValueError(
            "training.shard_gradients: given false, but training.sharding=zero3 keeps no whole gradients; leave it "
            "out, or set sharding=zero2"
        )
