"""Folders in the hub's layout at released widths and few layers, and every command of a run on them, on a CPU in bf16.

    python benchmarks/released_folders.py --families flux_fill z_image --work WORK --out released_folders.json

Weights are random and tokenizers those of bytes; configs, widths, heads and vocabulary sizes are the released ones.
Autoencoders alone are narrower, and U-Nets run in fp32: a CPU without bf16 instructions takes a minute for an image of
64 pixels otherwise. The folder of a family is deleted before that of the next: at most 12 GB of disk and 8 GB of
memory. A folder has what the hub's have: weights in several files with an index, T5 in fp32, Stable Diffusion's in
files of the variant fp16 alone, no safety checker, and for half of the families the layout of the hub's cache: links
from a commit to blobs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import inspect
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
import yaml
from accelerate import init_empty_weights
from loop_overhead import machine
from random_models import fill

from retouch.config import parse_run
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.released import T5_XXL
from retouch.families.tiny import tiny_pipeline
from retouch.tiny.signs import draw_words, write_signs

SHARD = "400MB"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

LAYERS: dict[str, Any] = {
    "num_layers": 2,
    "num_single_layers": 1,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "num_hidden_layers": 4,
    "depth": 1,
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "dual_attention_layers": (0,),
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""Number of layers of a config -> the one here. A text encoder of four has the quarters that FLUX.2 takes."""

CACHED = {"flux_dev", "qwen_image", "z_image", "sd3", "sdxl_inpaint", "qwen_image_21"}
"""Families whose files lie in the hub's cache; the others' are in a folder."""

TOKENS = {"flux": 16, "sd3": 16, "qwen": 96, "z_": 64}
"""Start of a family's name -> tokens of a prompt: a language model of the released width takes a second for two."""

VARIANT = {"sd_inpaint", "sdxl_inpaint"}
"""Families with files of the variant fp16 alone."""

SAVED_AS = {("z_image", "text_encoder"): "Qwen3ForCausalLM"}
"""(family, folder) -> class that a network was saved as, where its pipeline loads a part of it."""


def write_folder(folder: Path, family: str, *, tiny: bool = False, seed: int = 0) -> Path:
    """A model of released widths and few layers.

    Args:
        tiny: write the family's toy networks, in the same layout.
    """
    spec, generator = FAMILIES[family].spec, torch.Generator().manual_seed(seed)
    toy = tiny_pipeline(family)
    index: dict[str, Any] = {"_class_name": spec.pipeline, "_diffusers_version": diffusers.__version__}
    for name, kind in spec.networks.items():
        dtype = torch.float32 if kind == "T5EncoderModel" else torch.float16 if family in VARIANT else torch.bfloat16
        if tiny:
            network: Any = toy.components[name].to(dtype)
        else:
            with init_empty_weights(include_buffers=False):
                network = make_network(spec, name, SAVED_AS.get((family, name), kind), marks_of(toy.components[name]))
            network = fill(network, torch.device("cpu"), dtype, generator, repeats=True)
        options: dict[str, Any] = {"variant": "fp16"} if family in VARIANT else {}
        network.save_pretrained(folder / name, max_shard_size="80KB" if tiny else SHARD, **options)
        index[name] = ["diffusers" if hasattr(diffusers, kind) else "transformers", kind]
        del network
    for name, part in toy.components.items():
        if name in index or part is None:
            continue
        if name == "tokenizer" and spec.tokenizer_in_processor:
            name = "processor"
        (part if tiny else lengthened(part)).save_pretrained(folder / name)
        index[name] = [type(part).__module__.split(".")[0], type(part).__name__]
    if spec.has_processor:
        as_older(folder / "processor")
    index |= {"feature_extractor": [None, None], "safety_checker": [None, None]} if family == "sd_inpaint" else {}
    index |= {k: v for k, v in toy.config.items() if isinstance(v, bool)}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def as_older(processor: Path) -> None:
    """Write the options of images where transformers wrote them before version 5, when these models were released."""
    file = processor / "processor_config.json"
    options = json.loads(file.read_text("utf-8"))
    images = options.pop("image_processor")
    size = images["size"]
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]} | options
    (processor / "preprocessor_config.json").write_text(json.dumps(images, indent=2), encoding="utf-8")
    file.unlink()


def lengthened(part: Any) -> Any:
    """A tokenizer of bytes with the released number of tokens."""
    longest = {"CLIPTokenizer": 77, "ByT5Tokenizer": 512}.get(type(part).__name__)
    if longest is not None:
        part.model_max_length = longest
    return part


def marks_of(toy: Any) -> dict[str, int]:
    """Ids of the tokens that mark images in the tokenizer of bytes of a toy network; none of other networks."""
    config = getattr(toy, "config", None)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def make_network(spec: FamilySpec, name: str, kind: str, marks: Mapping[str, int]) -> Any:
    """A network of its released widths with the layers of `LAYERS`; an autoencoder of few channels.

    Args:
        marks: ids of tokens in place of the released ones.
    """
    few = shortened(spec.released.get(name) or PARTS[name if kind.startswith("CLIP") else kind]) | dict(marks)
    if name == "vae":
        few |= NARROW[kind]
        if spec.prediction == "epsilon":
            few |= {"latent_channels": 4, "scaling_factor": 0.18215}
    if hasattr(diffusers, kind):
        return getattr(diffusers, kind)(**few)
    made = getattr(transformers, kind)
    return made(made.config_class(**few))


_LEVELS = {"block_out_channels": (32, 32, 64, 64), "layers_per_block": 1}

NARROW: dict[str, dict[str, Any]] = {
    "AutoencoderKL": _LEVELS
    | {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4},
    "AutoencoderKLFlux2": _LEVELS,
    "AutoencoderKLQwenImage": {"base_dim": 16},
    "AutoencoderKLQwenImage21": {"base_dim": 16},
}
"""Options of autoencoders with the released latents and few channels."""

_CLIP = {"vocab_size": 49408, "num_hidden_layers": 12, "eos_token_id": 2}

PARTS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "AutoencoderKLFlux2": {},
    "AutoencoderKLQwenImage": {},
    "AutoencoderKLQwenImage21": {},
    "text_encoder": {**_CLIP, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "text_encoder_2": {
        **_CLIP,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "projection_dim": 1280,
    },
    "T5EncoderModel": T5_XXL,
}
"""Configs that no family's facts have: of CLIPs by their folder, of others by their class."""


def shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with few layers."""
    return {
        name: shortened(value) if isinstance(value, Mapping) else LAYERS.get(name, value)
        for name, value in config.items()
    }


def into_cache(folder: Path, cache: Path, hub_id: str) -> str:
    """Move a folder into a hub cache, as huggingface_hub lays one out; returns the hub id."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = repository / "blobs" / hashlib.sha256(str(file.relative_to(folder)).encode()).hexdigest()
        link = repository / "snapshots" / COMMIT / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    shutil.rmtree(folder)
    return hub_id


def run_of(family: str, path: str, work: Path, side: int = 64, **model: Any) -> dict[str, Any]:
    """A run file of one optimizer step."""
    write_signs(work / "signs", draw_words(2, "train", 1), (side, side), 1)
    write_signs(work / "held_out", draw_words(1, "held_out", 2), (side, side), 2, first_id=100)
    data = {"format": "self_bench", "path": str(work / "signs"), "resolution": [side, side]}
    return {
        "name": family,
        "model": {"family": family, "path": path, "dtype": "bf16", "train": {"kind": "lora", "rank": 4}, **model},
        "data": data,
        "rollout": {
            "group_size": 2,
            "global_groups_per_batch": 1,
            "batch_size_per_device": 2,
            "num_steps": 2,
            "window": {"size": 1, "range": [0.0, 0.5]},
        },
        "algorithm": {"name": "grpo"},
        "rewards": {"preservation": {}},
        "optimizer": {"batch_size_per_device": 2, "gradient_accumulation": 1},
        "training": {
            "max_steps": 1,
            "checkpoint_every": 1,
            "eval_every": 0,
            "mixed_precision": "no" if model.get("dtype") == "fp32" else "bf16",
        },
        "evaluation": {
            "data": data | {"path": str(work / "held_out")},
            "num_examples": 1,
            "num_steps": 1,
            "grid_examples": 0,
        },
        "logging": {"dir": str(work / "runs"), "sinks": []},
    }


def commands(work: Path, family: str, *, stores: bool) -> dict[str, list[object]]:
    """Command -> its arguments, in an order in which each finds what it needs."""
    file, run = work / "run.yaml", work / "runs" / family
    listed: dict[str, list[object]] = {
        "doctor": ["doctor", file],
        "check --memory": ["check", file, "--memory"],
        "data precompute": ["data", "precompute", file, "--out", work / "embeddings"],
        "train": ["train", file],
        "sample": ["sample", "--run", run, "--data", work / "held_out", "--out", work / "samples", "--steps", "1"],
        "eval": ["eval", "--run", run],
        "export diffusers-lora": ["export", run, "--to", "diffusers-lora", "--out", work / "lora"],
        "export diffusers": ["export", run, "--to", "diffusers", "--out", work / "whole"],
    }
    return listed if stores else {name: call for name, call in listed.items() if name != "data precompute"}


def retouch(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `retouch ...` in this process."""
    from retouch.cli import main as command_line

    told = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["retouch", *map(str, arguments)]),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
    ):
        try:
            command_line()
        except SystemExit as end:
            return int(end.code or 0), told.getvalue()
    return 0, told.getvalue()


def walk(
    family: str, work: Path, path: str, report: Callable[..., None] = lambda *_: None, **model: Any
) -> dict[str, tuple[int, str]]:
    """Every command on a model -> its exit code and output."""
    run = run_of(family, path, work, **model)
    (work / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    config = parse_run(run)
    stores = not config.model.vision_tokens(config.data.size)  # else its text encoder reads images with the prompt
    found: dict[str, tuple[int, str]] = {}
    for name, call in commands(work, family, stores=stores).items():
        started = time.monotonic()
        found[name] = retouch(*call)
        gc.collect()  # networks and their hooks refer to each other; the next command would load beside them
        report(family, name, *found[name], time.monotonic() - started)
    found["read by diffusers"] = read_exports(family, work)
    report(family, "read by diffusers", *found["read by diffusers"], 0.0)
    return found


def read_exports(family: str, work: Path) -> tuple[int, str]:
    """The exported model and adapter, as diffusers loads them -> 0 or 1, and the error."""
    spec = FAMILIES[family].spec
    try:
        kind = getattr(diffusers, spec.networks[spec.network_name])
        network = kind.from_pretrained(work / "whole", subfolder=spec.network_name, dtype=torch.bfloat16)
        [adapter] = (work / "lora").glob("*.safetensors")
        whole = getattr(diffusers, json.loads((work / "whole/model_index.json").read_text("utf-8"))["_class_name"])
        read_adapter(whole, spec.network_name, network, adapter)
        if not spec.has_processor:  # whose class needs torchvision
            diffusers.DiffusionPipeline.from_pretrained(
                work / "whole", dtype=torch.bfloat16, variant="fp16" if family in VARIANT else None
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def read_adapter(pipeline: Any, name: str, network: Any, file: Path) -> None:
    """Load a LoRA file as `pipeline.load_lora_weights` does; pipelines differ in what they ask beside the weights."""
    state = pipeline.lora_state_dict(str(file), **{"unet_config": network.config} if name == "unet" else {})
    weights, alphas = state if isinstance(state, tuple) else (state, None)
    load = getattr(pipeline, f"load_lora_into_{name}")
    asks = "network_alphas" in inspect.signature(load).parameters
    load(weights, **{"network_alphas": alphas} if asks else {}, **{name: network})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=[f for f in FAMILIES if f != "flux2_dev"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32"], default="bf16", help="fp32 is ten times as fast on old CPUs"
    )
    parser.add_argument("--out", type=Path, help="JSON whose rows of these families are written anew")
    options = parser.parse_args()
    for family in options.families:
        work: Path = options.work / family
        work.mkdir(parents=True)
        started = time.monotonic()
        dtype = "fp32" if family in VARIANT else options.dtype
        row: dict[str, Any] = {"machine": machine(), "dtype": dtype, "commands": {}}
        try:
            walk_released(family, work, partial(record, row["commands"]), dtype=dtype)
        finally:
            shutil.rmtree(work)
        row["seconds"] = round(time.monotonic() - started)
        print(f"{family:16} {row['seconds']} s", flush=True)
        if options.out:
            rows = json.loads(options.out.read_text("utf-8")) if options.out.is_file() else {}
            options.out.write_text(json.dumps(rows | {family: row}, indent=2) + "\n", encoding="utf-8")


def record(commands: dict[str, Any], family: str, command: str, code: int, told: str, seconds: float) -> None:
    """Print the outcome of a command, and add it to its row."""
    commands[command] = {"exit_code": code, "seconds": round(seconds)}
    print(f"{family:16} {command:22} {code} {seconds:5.0f} s  {told[-1500:].strip() if code else ''}", flush=True)


def walk_released(
    family: str, work: Path, report: Callable[..., None] = lambda *_: None, *, dtype: str = "bf16"
) -> dict[str, tuple[int, str]]:
    """`walk` on a folder of `write_folder`, half of them in a hub cache."""
    path = str(write_folder(work / "model", family))
    with contextlib.ExitStack() as stack:
        if family in CACHED:
            cache = work / "hub"
            path = into_cache(Path(path), cache, FAMILIES[family].spec.hub_ids[0])
            stack.enter_context(in_cache(cache))
        options: dict[str, Any] = (
            {"weights_variant": "fp16", "dtype": "fp32"} if family in VARIANT else {"dtype": dtype}
        )
        for start, tokens in TOKENS.items():
            if family.startswith(start):
                options["max_sequence_length"] = 80 if family == "flux2_klein" else tokens
        return walk(family, work, path, report, **options)


@contextlib.contextmanager
def in_cache(cache: Path) -> Iterator[None]:
    """Inside, a hub that cannot be reached has left its files in this cache."""
    from huggingface_hub import constants

    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    with (
        mock.patch.dict(os.environ, offline),
        mock.patch.object(constants, "HF_HUB_CACHE", str(cache)),
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
    ):
        yield


if __name__ == "__main__":
    main()
