"""Every published run file: it validates, it trains, and it fits the network at its released size.

A new file under configs/ is tested by being there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from retouch.adapters.trainee import make_trainable
from retouch.algorithms.base import RlConfig
from retouch.algorithms.nft.config import NftConfig
from retouch.config import ConfigError, derive, load_run
from retouch.config.derived import snapshots
from retouch.config.load import read_yaml
from retouch.data.remote import pinned
from retouch.engine.saved import complete_checkpoints
from retouch.families import FAMILIES
from retouch.families.loading import load_model
from retouch.observe.run_dir import read_metrics
from tests.command_line import retouch
from tests.families.facts import facts_of
from tests.rewards.openai_server import OpenAIServer
from tests.selection import covering, default
from tests.tiny_models import PACKAGED, WITH_BASE, released_network, tiny_model

from .conftest import CONFIGS, RUNS, name_of, shrink

TINY = [path for path in RUNS if path.parent.name == "tiny"]
RELEASED = [path for path in RUNS if path not in TINY]

ADAPTER_PARAMETERS = {"flux_fill": 2.65e9, "sd_inpaint": 22.7e6, "qwen_image": 2.38e9}
"""Of the style adapters, on vectors of SigLIP so400m."""

QUERY_FORMER_PARAMETERS = 0.37e9
"""Of Calligrapher's second head."""

SIGLIP_WIDTH = 1152

ALGORITHMS = ("sft", "grpo", "ppo", "dpo", "nft", "reward_gradient")


@pytest.mark.parametrize("family", WITH_BASE)
def test_every_family_has_every_algorithm_on_full_weights_and_on_adapters(family: str) -> None:
    """Released models train adapters unless the file says full, tiny ones the other way round."""
    for paths, plain, other in ((RELEASED, "lora", "full"), (TINY, "full", "lora")):
        kinds = {p.stem: load_run(p).model.train.kind for p in paths}
        for algorithm in ALGORITHMS:
            assert kinds[f"{family}_{algorithm}"] == plain
            assert kinds[f"{family}_{algorithm}_{other}"] == other


@pytest.mark.parametrize("path", RUNS, ids=name_of)
@pytest.mark.parametrize("world_size", [1, 8])
def test_it_is_valid(path: Path, world_size: int) -> None:
    run = load_run(path)
    derived = derive(run, world_size)
    assert derived.padded_images_per_epoch == 0  # on one device and on eight, nothing is sampled for nothing
    assert not run.algorithm.trains_on_rewards or derived.epochs > 0


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_it_is_named_after_its_file(path: Path) -> None:
    assert load_run(path).name == ("tiny_" if path in TINY else "") + path.stem


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_model_and_data_come_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(path)
    assert run.model.path == "somebody/model"
    assert run.data.path in ("a/folder", "a/manifest.json")
    monkeypatch.delenv("MODEL_PATH")
    facts = facts_of(run.model.family)
    assert load_run(path).model.path == facts.other_hub_ids.get(path.stem.rpartition("_")[0], facts.hub_id)
    variable = "DATA_JSON_PATH" if "_manifest_" in path.stem else "DATA_PATH"
    monkeypatch.delenv(variable)
    if path.parent.name == "reproduce":
        return
    with pytest.raises(ConfigError, match=rf"\$\{{{variable}\}} is not set in the environment"):
        load_run(path)


@pytest.mark.parametrize("path", [path for path in RELEASED if path.parent.name == "reproduce"], ids=name_of)
def test_a_published_run_names_its_public_data_at_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the project whose code is reproduced, unless the environment names other files. Where no repository has
    the data, the file names the data set of the hub, and reads the variables alone."""
    monkeypatch.delenv("DATA_PATH")
    monkeypatch.delenv("EVAL_DATA_PATH")
    if dataset := re.search(r"data set\n#\s+(\S+/\S+) of the hub", path.read_text(encoding="utf-8")):
        assert dataset[1] == "random123123/BrushData"
        with pytest.raises(ConfigError, match=r"\$\{DATA_PATH\} is not set in the environment"):
            load_run(path)
        return
    run = load_run(path)
    assert run.evaluation.data is not None
    trained, held_out = (pinned(section.path) for section in (run.data, run.evaluation.data))
    assert trained is not None and held_out is not None
    assert (trained.repository, trained.commit) == (held_out.repository, held_out.commit)
    assert f"github.com/{trained.repository} at " in path.read_text(encoding="utf-8")
    assert ("train." in trained.place, held_out.place) == (True, trained.place.replace("train.", "test."))


@pytest.mark.parametrize("path", [path for path in RELEASED if "_manifest_" in path.stem], ids=name_of)
def test_a_list_of_descriptions_is_all_that_its_run_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_PATH")
    run = load_run(path)
    assert run.evaluation.data is None and run.warmup_data is None  # no second variable
    assert "ocr" not in run.rewards and run.rewards["clip"].crop == "mask_box"
    named = re.findall(r'"(rewards\.\w+=[^"]*)"', " ".join(path.read_text(encoding="utf-8").split("\n# ")))
    assert len(named) == (5 if path.stem.endswith("manifest_grpo") else 0)
    for overrides, kept in ((named[:2], {"hpsv2", "seam"}), (named[2:], {"mask_composite"})) if named else ():
        rewards = load_run(path, overrides).rewards
        assert {name for name, entry in rewards.items() if entry.role == "train"} == kept


@pytest.mark.parametrize("path", [path for path in RELEASED if "calligrapher" in path.stem], ids=name_of)
def test_calligraphers_adapter_and_its_image_encoder_come_from_the_environment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGLIP_PATH", "a/siglip")
    run = load_run(path)
    train = run.model.train
    assert train.kind == "ip_adapter"
    assert (train.initial_adapter, train.image_encoder, train.query_former) == ("a/calligrapher.bin", "a/siglip", True)
    assert run.rewards["style"].image_encoder == "a/siglip"  # type: ignore[attr-defined]
    assert getattr(run.algorithm, "sft_steps", None) == 0
    monkeypatch.delenv("SIGLIP_PATH")
    again = load_run(path).model.train
    assert again.kind == "ip_adapter" and again.image_encoder == "google/siglip-so400m-patch14-384"
    monkeypatch.delenv("CALLIGRAPHER_PATH")
    with pytest.raises(ConfigError, match=r"\$\{CALLIGRAPHER_PATH\} is not set in the environment"):
        load_run(path)


@pytest.mark.parametrize("path", TINY, ids=name_of)
def test_a_tiny_run_needs_no_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL_PATH")
    monkeypatch.delenv("DATA_PATH")
    run = load_run(path)
    built = f"runs/text-to-image/{run.model.family}"  # by `retouch tiny build`
    assert run.model.path == ("tiny" if run.model.family in PACKAGED else built)
    assert run.data.path.split("/")[0] == "runs"


def kind_of(path: Path) -> tuple[str, str, str]:
    """Family, algorithm and trained weights of a run."""
    run = read_yaml(path)
    return run["model"]["family"], run["algorithm"]["name"], run["model"]["train"]["kind"]


OF_KIND: dict[tuple[str, str, str], list[Path]] = {}
for run_path in RUNS:
    OF_KIND.setdefault(kind_of(run_path), []).append(run_path)

COVER = covering([(family, (algorithm, kind)) for family, algorithm, kind in OF_KIND], strength=1)
VARIED = [OF_KIND[family, *what][n % len(OF_KIND[family, *what])] for n, (family, what) in enumerate(COVER)]  # type: ignore[index]
TRAITS = {(*kind_of(path), path in TINY, "_manifest_" in path.stem): path for path in VARIED}
STEPPED = {TRAITS[row] for row in covering(TRAITS, strength=1)}  # type: ignore[index]
"""The runs that a default run of the tests trains for a step: for every family, every algorithm, everything that is
trained, a tiny one and one on a list of descriptions."""

FIRST: dict[str, Path] = {}
"""A released run of a LoRA for one family of each architecture, one of all weights and one of a style adapter."""
for run_path in RELEASED:
    run_family, _, run_kind = kind_of(run_path)
    if run_kind != "lora" or run_family in (
        "flux_fill",
        "flux2_klein",
        "sd_inpaint",
        "sd3",
        "z_image",
        "qwen_image_21",
    ):
        FIRST.setdefault(run_family if run_kind == "lora" else run_kind, run_path)


@pytest.mark.parametrize("path", default(RUNS, STEPPED.__contains__), ids=name_of)
def test_one_step(path: Path, signs: dict[str, Path], tmp_path: Path, picky: OpenAIServer) -> None:
    """One optimizer step of each of its phases on the tiny base: sampled, scored, trained, saved."""
    overrides = shrink(path, signs, tmp_path)
    run = load_run(path, overrides)
    outcome = retouch("train", path, *overrides)
    assert outcome.code == 0, outcome.err
    records = read_metrics(tmp_path / run.name / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    phases = ["sft"] if run.algorithm.name == "sft" else ["warmup", "rl"] if run.algorithm.sft_steps else ["rl"]
    assert [record["phase"] for record in steps] == phases
    for record in steps:
        assert record["grad_norm"] > 0
        assert record["lr"] > 0
    if "rl" in phases:
        assert steps[-1]["skipped"] == 0
        # before the first update: rollout and training, policy and reference, policy and old policy are one
        assert steps[-1].get("max_abs_log_ratio", 0) <= 1e-5
        assert steps[-1].get("logit", 0) == 0 and steps[-1].get("old_velocity_distance", 0) == 0
    if run.algorithm.trains_on_rewards:
        [rollouts] = [record for record in records if record["kind"] == "rollout"]
        assert rollouts["images"] == derive(run).global_images_per_epoch
        scored = {f"reward/{name}" for name, entry in run.rewards.items() if entry.role == "train"}
        assert scored <= rollouts.keys()
    newest = complete_checkpoints(tmp_path / run.name / "checkpoints")[-1]
    assert newest.name == f"step-{len(phases):06d}"
    kept = {file.stem for file in (newest / "snapshots").glob("*")}
    assert kept | ({"ema"} if (newest / "ema").is_dir() else set()) == snapshots(run)
    [file] = (newest / "weights").glob("*.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())
    assert {record["moment"] for record in records if record["kind"] == "eval"} >= {"start", "end"}


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_guidance_has_what_it_needs(path: Path) -> None:
    """Of families with true guidance: DiffusionNFT samples without it, as its paper does, and supervised steps train
    the prediction without a caption that guidance needs."""
    run = load_run(path)
    if not FAMILIES[run.model.family].spec.doubles_for_guidance:
        return
    if isinstance(run.algorithm, NftConfig):
        assert run.rollout.guidance_scale == 1.0
    supervised = not isinstance(run.algorithm, RlConfig) or run.algorithm.sft_steps > 0
    assert run.algorithm.caption_dropout == (0.1 if supervised else 0.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("path", [path for path in RELEASED if path.stem.endswith("_full")], ids=name_of)
def test_the_memory_that_it_names_is_what_its_state_takes(path: Path) -> None:
    """In its first line, of all weights of the network: beside these, the state of an adapter is nothing."""
    run = load_run(path)
    named = re.search(r"(\d+) GB of state", path.read_text(encoding="utf-8").splitlines()[0])
    state = derive(run).state_bytes_per_weight * facts_of(run.model.family).parameters
    assert named and int(named[1]) == round(state / 1e9)


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_the_overrides_that_it_names_for_data_without_targets_work(path: Path) -> None:
    first, text = path, path.read_text(encoding="utf-8")
    while below := yaml.safe_load(text).get("extends"):
        first = first.parent / below
        text = first.read_text(encoding="utf-8")
    comments = " ".join(re.findall(r"^# *(.*)$", text, re.MULTILINE))
    named = re.search(r"without targets, set((?: [a-z_.]+=\w+)+)", comments)
    algorithm = load_run(first).algorithm
    assert (named is None) == (algorithm.name == "sft" or algorithm.sft_steps == 0)
    if named:
        assert load_run(path, named[1].split()).algorithm.sft_steps == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("path", default(RELEASED, lambda path: path in FIRST.values()), ids=name_of)
def test_what_it_trains_is_in_the_released_network(path: Path) -> None:
    config = load_run(path).model
    train, made = config.train, made_trainable(config)
    assert made.kind == train.kind
    if train.kind == "full":
        assert made.parameters == made.base
    elif train.kind == "ip_adapter":
        expected = ADAPTER_PARAMETERS[config.family] + QUERY_FORMER_PARAMETERS * train.query_former
        assert made.whole - made.base == pytest.approx(expected, rel=0.005)
        assert len(made.names) == made.adapter_names
    else:
        assert len(made.names) == 2 * facts_of(config.family).lora_modules
        assert all(".lora_A." in name or ".lora_B." in name for name in made.names)
        assert made.ranks == {train.rank}


@dataclass(frozen=True)
class Made:
    """A released network after its trained part was made: numbers of its parameters before, after, and trained."""

    kind: str
    base: int
    whole: int
    parameters: int
    names: list[str]
    adapter_names: int
    ranks: set[int]


MADE: dict[str, Made] = {}


def made_trainable(config: Any) -> Made:
    """Once for all files with the same family and the same section `train`."""
    train = config.train
    if train.kind == "ip_adapter":
        train = train.model_copy(update={"image_encoder": "tiny", "initial_adapter": None})
    key = f"{config.family} {train.model_dump_json()}"
    if key not in MADE:
        config = config.model_copy(update={"path": tiny_model(config.family), "transformer": None, "train": train})
        if config.family == "qwen_image_edit":
            config = config.model_copy(update={"variant": "edit"})  # of the tiny base
        MADE[key] = made(config, replace(load_model(config).spec, reference_width=SIGLIP_WIDTH))
    return MADE[key]


def made(config: Any, spec: Any) -> Made:
    network = released_network(config.family)
    base = parameters(network)
    with torch.device("meta"):
        trainee = make_trainable(network, config.train, spec)
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    return Made(
        config.train.kind,
        base,
        parameters(network),
        sum(parameter.numel() for parameter in trained.values()),
        list(trained),
        len(trainee.adapter.names) if config.train.kind == "ip_adapter" else 0,  # type: ignore[attr-defined]
        {parameter.shape[0] for name, parameter in trained.items() if ".lora_A." in name},
    )


def test_every_file_is_tested() -> None:
    assert {path.parent for path in RUNS} == {CONFIGS, CONFIGS / "reproduce", CONFIGS / "tiny"}


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
