"""What `retouch check --memory` says of vlm_grpo is what such a run holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("trl")

from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from retouch.algorithms.vlm_grpo import scoring
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.algorithms.vlm_grpo.run import build_run
from retouch.algorithms.vlm_grpo.trainer import trl_arguments
from retouch.config import RunConfig, load_run
from retouch.config.errors import ConfigError
from retouch.doctor import vlm_memory
from retouch.doctor.launch import Launch, read_launch
from retouch.doctor.memory import memory_table, report_memory
from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.doctor.vlm_memory import BUCKET, LIVE, PolicyEncoder, make_text_encoder, vlm_parts
from retouch.families.loading import DTYPES
from retouch.families.meta import (
    on_meta,
    to_run_without_data,
    without_data,
)
from retouch.families.vae import frame_by_frame
from retouch.observe.live_bytes import LiveBytes
from tests.algorithms.vlm_runs import run_section
from tests.command_line import retouch

REPOSITORY = Path(__file__).parents[2]
LIMIT = 0.1
"""Relative difference, as of everything else that is counted (tests/benchmarks/test_memory.py)."""

FULL = {"use_peft": None, "lora_r": None, "lora_alpha": None, "lora_dropout": None}
ZERO = REPOSITORY / "configs/accelerate"


def run_of(folder: Path, trl: dict[str, Any], **sections: Any) -> RunConfig:
    """Two passes a step of four completions each."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 12, **trl}
    section = run_section(folder, given, **sections)
    section["algorithm"]["trl"] = {name: v for name, v in section["algorithm"]["trl"].items() if v is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump(section), encoding="utf-8")
    return load_run(folder / "run.yaml")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the head that are no larger than the rest of a tiny model."""
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32)
    monkeypatch.setattr(vlm_memory, "HEAD_TILE", (4096, 32))


class Measured:
    """Peaks of the phases of a run as it goes, the sizes that they had, and what was held before an update."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.sizes: dict[str, Any] = {}
        self.held = 0

    def around(self, place: Any, name: str, phase: str, sizes: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
        original = getattr(place, name)

        def measured(*args: Any, **options: Any) -> Any:
            with LiveBytes() as live:
                output = original(*args, **options)
            self.peaks[phase] = live.peak
            self.sizes[phase] = sizes(output, *args)
            return output

        patch.setattr(place, name, measured)


@contextmanager
def trainer_of(config: RunConfig) -> Iterator[VlmTrainer]:
    arguments = trl_arguments(config)
    parts = build_run(config, arguments.device, 1, main=True)
    parts.dir.open(None)
    parts.rewards.start()
    try:
        trainer = VlmTrainer(parts, arguments)
        trainer.owes_evaluation = False
        yield trainer
    finally:
        parts.close()


def held_by(trainer: VlmTrainer) -> int:
    """Bytes of weights, gradients and moments, and of the networks that draw."""
    painter, optimizer = trainer.run.diffusion_model, trainer.optimizer
    assert optimizer is not None
    weights = list(trainer.model.parameters())  # type: ignore[union-attr]
    tensors = [*weights, *painter.network.parameters(), *painter.vae.parameters()]
    tensors += [weight.grad for weight in weights if weight.grad is not None]
    tensors += [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def measure(config: RunConfig, patch: pytest.MonkeyPatch) -> Measured:
    """Two steps of a run; of every phase the last time."""
    found = Measured()
    with trainer_of(config) as trainer:
        found.around(
            trainer,
            "_generate_single_turn",
            "generates",
            lambda said, ids, *_: (len(ids), max(map(len, ids)), max(map(len, said[0]))),
            patch,
        )
        found.around(trainer.scorer, "states", "encodes", lambda states, *_: max(map(len, states[0])), patch)
        found.around(scoring, "generate_images", "draws", lambda _, __, rows, *___: (len(rows), rows[0].size), patch)
        scores = trainer._get_per_token_logps_and_entropies

        def scored(model: Any, ids: Any, *args: Any, **options: Any) -> Any:
            found.sizes["trains"] = tuple(ids.shape)
            with LiveBytes() as live:
                output = scores(model, ids, *args, **options)
            if not torch.is_grad_enabled():
                found.peaks["asks the reference"] = live.peak
            return output

        patch.setattr(trainer, "_get_per_token_logps_and_entropies", scored)
        found.around(trainer, "training_step", "trains", lambda *_: found.sizes["trains"], patch)
        clip = trainer._clip_grad_norm

        def clipped(model: Any) -> Any:
            found.held = held_by(trainer)
            return clip(model)

        patch.setattr(trainer, "_clip_grad_norm", clipped)
        trainer.train()
    return found


class WithTable(torch.nn.Module):
    """It keeps a tensor that is no buffer, as the positions of Qwen-Image do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(x.device)
        return x + self.table[0]


def test_a_tensor_that_is_no_buffer_is_not_memory_of_a_forward() -> None:
    mode = without_data()
    to_run_without_data(network := on_meta(WithTable), mode, lambda weight: torch.float32)
    with mode, LiveBytes() as live:
        network(torch.empty(1))
    assert live.peak == 2 * 4


@pytest.mark.parametrize(
    ("trl", "sections"),
    [
        ({"beta": 0.1}, {"model__dtype": "bf16", "training__mixed_precision": "bf16"}),
        pytest.param(FULL, {"training__gradient_checkpointing": True}, marks=pytest.mark.full),
        pytest.param({}, {}, marks=pytest.mark.slow),
        pytest.param(FULL, {"training__mixed_precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["lora-bf16", "full-recomputed", "lora", "full-bf16"],
)
def test_what_a_run_holds_is_what_is_counted(
    trl: dict[str, Any], sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tiles: None
) -> None:
    """Phase by phase, at the sizes that the run had; and weights, gradients and moments before an update."""
    config = run_of(tmp_path, trl, **sections)
    found = measure(config, monkeypatch)
    networks = build_networks(config.model, find_model(config.model)).parts
    transformer, vae, mode = networks["transformer"], networks["vae"], without_data()
    policy = make_text_encoder(config, networks["text_encoder"], mode, Launch())
    for network in (transformer, vae):
        to_run_without_data(network, mode, lambda weight: DTYPES[config.model.dtype])
    frame_by_frame(vae)
    plain, around = vlm_memory.autocast("no"), vlm_memory.autocast(config.training.mixed_precision)
    adapter = config.algorithm.uses_adapter  # type: ignore[union-attr]
    completions, prompt, said = found.sizes["generates"]
    pictures, size = found.sizes["draws"]
    rows, tokens = found.sizes["trains"]
    rows = min(rows, 4)  # of eight that the reference is asked about
    scored = tokens - 1  # all of them where there is no triton
    with mode:
        expected = {
            "generates": vlm_memory.generating(policy.model, completions, prompt, said, plain if adapter else around),
            "encodes": vlm_memory.encoding(policy.model, completions, prompt + said),
            "draws": vlm_memory.generating_images(
                transformer, vae, pictures, pictures, size, found.sizes["encodes"], 1
            ),
        }
        if "asks the reference" in found.peaks:
            expected["asks the reference"] = vlm_memory.comparing(policy.model, rows, tokens, scored, around)
        policy.model.train()
        expected["trains"] = vlm_memory.training_step(policy.model, rows, tokens, scored, around)
    assert expected.keys() == found.peaks.keys()
    assert {phase: found.peaks[phase] / count for phase, count in expected.items()} == pytest.approx(
        dict.fromkeys(expected, 1.0), abs=LIMIT
    )
    weights = {name: sum(w.numel() for w in network.parameters()) for name, network in networks.items()}
    parts = vlm_parts(config, policy, {name: weights[name] for name in ("transformer", "vae")}, Launch())
    assert found.held == sum(part.bytes for part in parts)
    assert policy.trained == (4 * 2 * 4 * (64 + 64) if adapter else weights["text_encoder"] - policy.frozen)


def test_with_data_and_without_it_is_the_same(tmp_path: Path) -> None:
    config = run_of(tmp_path, {"lora_dropout": 0.1}, training__gradient_checkpointing=True)
    counted: list[tuple[int, ...]] = []
    for data in (True, False):
        encoder = build_networks(config.model, find_model(config.model)).parts["text_encoder"]
        mode = without_data()
        policy = make_text_encoder(config, encoder, mode, Launch()).model
        if data:
            for module in policy.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
                            tensors[name] = torch.nn.Parameter(made, True) if tensor.requires_grad else made
        with torch.device("cpu") if data else mode:
            phases = (
                vlm_memory.generating(policy, 3, 20, 7),
                vlm_memory.encoding(policy, 2, 27),
                vlm_memory.comparing(policy, 2, 27, 7),
                vlm_memory.training_step(policy.train(), 2, 27, 7),
            )
        counted.append(phases)
    assert counted[0] == counted[1]
    assert min(counted[0]) > 0


def test_live_bytes_by_hand() -> None:
    weight = torch.ones(10, 10)
    with LiveBytes() as live:
        first = weight + 1  # 400
        view = first[:5]
        second = weight * 2  # 800
        first.add_(1)
        assert live.now == live.peak == 800
        del first
        assert live.now == 800  # the view has it
        del view, second
        assert (live.now, live.peak) == (0, 800)
        live.add(900)
    assert (live.now, live.peak) == (0, 900)


def test_keys_and_values_are_those_of_the_released_model() -> None:
    """57,344 bytes a token: keys and values of 28 layers, 4 heads of 128 numbers in bf16."""
    encoder = build_networks(released("qwen_image").model, find_model(released("qwen_image").model)).parts[
        "text_encoder"
    ]
    encoder.model.language_model.layers = encoder.model.language_model.layers[:2]
    encoder.model.language_model.config.num_hidden_layers = 2
    mode = without_data()
    to_run_without_data(encoder, mode, lambda weight: torch.bfloat16)
    with mode:
        short, long = (vlm_memory.generating(encoder.requires_grad_(False), 3, 8, new) for new in (100_000, 200_000))
    two_layers = 2 * 57_344 // 28
    growing = 57_344 // 28 // 2  # keys of a layer are copied to be one longer
    assert (long - short) / (3 * 100_000) == pytest.approx(two_layers + growing, rel=0.01)


def test_the_head_takes_the_tiles_that_trl_does() -> None:
    assert vlm_memory.HEAD_TILE == (chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def released(family: str, **sections: Any) -> RunConfig:
    """The published run of a family, whose model is not here."""
    name = "qwen_image_vlm_grpo_8gpu" if family == "qwen_image" else "qwen_image_edit_vlm_grpo_8gpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATA_PATH", "somewhere")
        return load_run(REPOSITORY / f"configs/{name}.yaml", [f"{key}={value}" for key, value in sections.items()])


LORA = 28 * 64 * (2 * (3584 + 3584) + 2 * (3584 + 512))
"""Rank 64 on queries, keys, values and outputs; keys and values have 4 of 28 heads."""

VLM, SEES, DIT, VAE = 8_292_166_656, 676_550_144, 20_430_401_088, 126_892_531


def policy_of(trained: int, trained_bytes: int, frozen: int, frozen_bytes: int) -> PolicyEncoder:
    return PolicyEncoder(None, trained, trained_bytes, frozen, frozen_bytes, autocasts=False)


@pytest.mark.parametrize(
    ("launch", "adapter", "held", "waiting"),
    [
        (Launch(), True, 4 * (1 + 1 + 2 + 1) * LORA + 2 * VLM, 0),
        (Launch(2), True, 2 * LORA + (2 + 8 + 4) * LORA // 8 + 2 * VLM, 0),
        (Launch(3), False, 16 * (VLM - SEES) // 8 + 2 * SEES // 8 + 2 * BUCKET, 0),
        (Launch(3, True, True), False, 2 * BUCKET, 16 * (VLM - SEES) // 8 + 2 * SEES // 8),
        (Launch(), False, 4 * 5 * (VLM - SEES) + 4 * SEES, 0),
    ],
    ids=["ddp", "zero2", "zero3", "zero3_offload", "ddp-full"],
)
def test_the_released_sizes_by_hand(launch: Launch, adapter: bool, held: int, waiting: int) -> None:
    """On eight processes; all of them hold what draws."""
    each = 2 if launch.stage else 4
    trained = LORA if adapter else VLM - SEES
    policy = policy_of(trained, each, VLM if adapter else SEES, 2 if adapter or launch.stage else 4)
    run = released("qwen_image", **({} if adapter else {"algorithm.trl": "{use_peft: false}"}))
    for away in ({}, {"offload_diffusion_model": True}):
        given = run.model_copy(update={"algorithm": run.algorithm.model_copy(update=away)})
        parts = vlm_parts(given, policy, {"transformer": DIT, "vae": VAE}, launch, 8)
        draws = 2 * (DIT + VAE)
        assert sum(p.bytes for p in parts if not p.waits) == held + (0 if away else draws)
        assert sum(p.bytes for p in parts if p.waits) == waiting + (draws if away else 0)


def test_the_released_text_encoder_is_trained_as_counted() -> None:
    run = released("qwen_image_edit")
    networks = build_networks(run.model, find_model(run.model))
    assert networks.whole
    assert {name: sum(w.numel() for w in part.parameters()) for name, part in networks.parts.items()} == {
        "transformer": DIT,
        "vae": VAE,
        "text_encoder": VLM,
    }
    policy = make_text_encoder(run, networks.parts["text_encoder"], without_data(), Launch(2))
    assert (policy.trained, policy.frozen, policy.trained_bytes, policy.frozen_bytes) == (LORA, VLM, 2, 2)


@pytest.mark.full
def test_phases_bring_what_waits_and_gather_what_is_sharded(tmp_path: Path) -> None:
    """ZeRO-3 gathers the weights for all but training; what waits on the CPU comes to draw."""
    reports: dict[str, dict[str, Any]] = {}
    for name, launch, sections in (
        ("none", None, {}),
        ("zero3", Launch(3), {}),
        ("zero2", Launch(2), {}),
        ("offloaded", None, {"algorithm__offload_diffusion_model": True}),
    ):
        reports[name] = report_memory(run_of(tmp_path, FULL, **sections), 2, launch)
    phases = {name: {p["what"]: p["bytes"] for p in report["phases"]} for name, report in reports.items()}
    plain = phases["none"]
    assert list(plain) == ["generates completions", "encodes completions", "generates images", "trains"]
    by_name = {part["what"]: part for part in reports["none"]["parts"]}
    encoder = sum(by_name[f"text encoder, {kind}"]["weights"] for kind in ("trained", "frozen"))
    gathered = dict.fromkeys(plain, 4 * encoder)
    assert encoder < LIVE
    assert phases["zero3"] == {what: count + gathered[what] for what, count in plain.items()}
    assert phases["zero2"] == {**plain, "trains": plain["trains"] + 4 * BUCKET}
    painter = sum(by_name[f"{name}, frozen"]["bytes"] for name in ("transformer", "vae"))
    assert phases["offloaded"] == {**plain, "generates images": plain["generates images"] + painter}
    assert reports["offloaded"]["host_bytes"] == painter
    for report in reports.values():
        largest = max(phase["bytes"] for phase in report["phases"])
        assert report["peak_bytes"] == report["device_bytes"] + largest
    assert reports["zero2"]["notes"] == ["temporary buffers of DeepSpeed's step"]
    assert reports["none"]["notes"] == []


def test_check_says_it_in_a_table(tmp_path: Path) -> None:
    run_of(tmp_path, {"optim": "adamw_8bit"}, algorithm__train_vision_tower=True)
    options = ("--memory", "--world-size", 2, "--accelerate", ZERO / "zero2.yaml")
    outcome = retouch("check", tmp_path / "run.yaml", *options)
    assert outcome.code == 0, outcome.err
    table = outcome.out[outcome.out.index("memory of a process") :].splitlines()[1:]
    names = [line.strip().split("  ")[0] for line in table]
    assert names == [
        *("LoRA, trained", "gradients", "optimizer", "DeepSpeed's copy of the weights", "text encoder, frozen"),
        *("transformer, frozen", "vae, frozen", "on the device", "+ while it generates completions"),
        *("+ while it encodes completions", "+ while it generates images", "+ while it trains", "at most"),
        "not counted: algorithm.trl.optim: its moments; those of AdamW in fp32 are counted",
        "not counted: algorithm.train_vision_tower: activations of the vision tower",
        "not counted: temporary buffers of DeepSpeed's step",
    ]
    report = json.loads(retouch("check", tmp_path / "run.yaml", "--json", *options).out)["memory"]
    assert memory_table(report)[1:] == ["    " + line.strip() for line in table]


@pytest.mark.parametrize(
    ("file", "launch"),
    [
        ("zero2", Launch(2, processes=8)),
        ("zero3", Launch(3, processes=8)),
        ("zero3_offload", Launch(3, True, True, 8)),
        ("gpu8", Launch(processes=8)),
        ("gpu1", Launch()),
    ],
)
def test_accelerate_says_how_it_is_launched(file: str, launch: Launch) -> None:
    assert read_launch(ZERO / f"{file}.yaml") == launch


def test_nvme_is_off_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    text = (ZERO / "zero3_offload.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("device: cpu", "device: nvme"), encoding="utf-8")
    assert read_launch(file) == Launch(3, True, True, 8)


def test_check_counts_for_as_many_processes_as_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told for how many."""
    counted: list[tuple[int, Launch | None]] = []

    def report(run: RunConfig, world_size: int, launch: Launch | None) -> dict[str, Any]:
        counted.append((world_size, launch))
        return {}

    monkeypatch.setattr("retouch.doctor.memory.report_memory", report)
    file = tmp_path / "a.yaml"
    file.write_text("num_processes: 2", encoding="utf-8")
    run_of(tmp_path, {})
    derived: list[int] = []
    for options in (("--accelerate", file), ("--accelerate", file, "--world-size", 1), ()):
        outcome = retouch("check", tmp_path / "run.yaml", "--json", "--memory", *options)
        derived.append(json.loads(outcome.out)["derived"]["world_size"])
    assert derived == [2, 1, 1]
    assert counted == [(2, Launch(processes=2)), (1, Launch(processes=2)), (1, None)]


def test_launches_that_cannot_be_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    with pytest.raises(ConfigError, match=r"--accelerate: .*a\.yaml is no configuration of accelerate; give"):
        read_launch(file)
    deepspeed = "distributed_type: DEEPSPEED\ndeepspeed_config: "
    others = ("{deepspeed_config_file: x}", "{zero_stage: auto}", "{zero_stage: 4}", "[zero_stage]", "zero_stage")
    for text in ("distributed_type: FSDP", *(deepspeed + other for other in others)):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="give one with distributed_type"):
            read_launch(file)
    for count in ("0", "auto", "[8]"):
        file.write_text(f"num_processes: {count}", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"num_processes is .*; write how many are launched, like 8"):
            read_launch(file)
    run_of(tmp_path, {})
    outcome = retouch("check", tmp_path / "run.yaml", "--accelerate", file)
    assert (outcome.code, outcome.err) == (
        2,
        "error: --accelerate: given without --memory, which is what it changes; add --memory\n",
    )
    tiny = REPOSITORY / "configs/tiny/flux_fill_grpo_lora.yaml"
    outcome = retouch("check", tiny, "--memory", "--accelerate", ZERO / "zero2.yaml")
    assert outcome.code == 2 and "--accelerate: given, but grpo is not sharded by accelerate; leave" in outcome.err
