"""Make the run directories of a commit that later versions must resume bitwise:

    python -m tests.old_runs.make COMMIT [NAME ...]

Run it in a checkout whose `src` is that of COMMIT. It writes `tests/old_runs/COMMIT`; NAMEs write these runs again:

    about.json    the commit and the tree of its `src`, the machine, the versions, a digest of this machine's arithmetic
    bases/        networks of a few thousand weights (`small_bases`), which no later version of the package replaces
    data/         images with their lists
    run_files/    NAME.yaml; paths are relative to the folder above, which is the working directory of every run
    runs/NAME/    the run directory of a run that was stopped or killed behind a checkpoint inside an epoch
    ended/NAME/   how COMMIT itself resumed that directory to its end: tensors and counters of the last checkpoint, and
                  metrics.jsonl. A run that nothing stopped ended with the same tensors and metrics, or this fails.

1c9919ed was made by this program in its first version, on the machine and with the versions of its about.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from retouch.tiny.edits import write_edits
from retouch.tiny.signs import draw_words, write_signs
from tests.old_runs.arithmetic import digests
from tests.old_runs.ended import Ended, differences
from tests.old_runs.small_bases import write_bases
from tests.old_runs.start import train

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "trl", "numpy", "pillow", "safetensors")
SIZE = (16, 32)

LEFT_OUT = (".lock", "log.txt", "report.html", "reward-server.log", "environment.json")
"""Files of a run directory that a resumed run writes anew, some of which name the machine."""

LORA = {"kind": "lora", "rank": 2, "alpha": 4}
SMALL_LORA = {**LORA, "targets": ["to_q", "to_v"]}
FULL = {"kind": "full"}
STYLE = {"kind": "ip_adapter", "image_encoder": "bases/image_encoder", "tokens": 4}
EMA = {"decay": 0.9, "update_interval": 1}
GRPO = {"name": "grpo", "clip_range": 1e-3, "kl_weight": 0.1, "sft_steps": 1, "inner_epochs": 2}
DPPO = {"name": "grpo", "kl_mask_threshold": 1e-5, "kl_weight": 0.1, "inner_epochs": 2}
NFT = {"name": "nft", "kl_weight": 0.1}
STOCHASTIC = {"noise_level": 0.7, "window": {"size": 2, "range": [0, 1]}}
VLM = {
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-5,
    "beta": 0.05,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "use_peft": True,
    "lora_r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
}


def model(family: str, train: Mapping[str, Any]) -> dict[str, Any]:
    length = {"max_sequence_length": 24} if family == "flux_fill" else {}
    return {"family": family, "path": f"bases/{family}", "dtype": "fp32", **length, "train": dict(train)}


def run(processes: int, every: int = 3, **sections: Any) -> dict[str, Any]:
    """A run file: four samples an epoch, two in each optimizer step."""
    signs = {"format": "self_bench", "resolution": list(SIZE)}
    return {
        "seed": 5,
        "resume": "auto",
        "data": {**signs, "path": "data/prompts", "target": "none"},
        "warmup_data": {**signs, "path": "data/targets"},
        "rollout": {"group_size": 2, "global_groups_per_batch": 2, "batch_size_per_device": 4, "num_steps": 3},
        "rewards": {"preservation": {}, "seam": {"weight": 0.5}},
        "optimizer": {
            "lr": 1e-2,
            "eps": 1e-5,
            "batch_size_per_device": 1,
            "gradient_accumulation": 2 // processes,
        },
        "training": {
            "max_steps": 7,
            "checkpoint_every": every,
            "keep_checkpoints": 1,
            "eval_every": 2,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {"data": {**signs, "path": "data/held_out"}, "num_examples": 2, "grid_examples": 0},
        "logging": {"dir": "runs", "sinks": []},
        **sections,
    }


def grpo(processes: int, every: int = 3, **sections: Any) -> dict[str, Any]:
    given = run(processes, every, **sections)
    return {**given, "rollout": {**given["rollout"], **STOCHASTIC}}


def sft(processes: int, **sections: Any) -> dict[str, Any]:
    given = run(processes, algorithm={"name": "sft"}, **sections)
    given["data"] = given.pop("warmup_data")
    return {name: section for name, section in given.items() if name not in ("rollout", "rewards")}


def vlm_grpo(processes: int) -> dict[str, Any]:
    """Checkpoints lie between generations, of which each is trained on twice; the whole run is one epoch of TRL's."""
    given = run(processes)
    options = {**VLM, "per_device_train_batch_size": 8 // processes}
    return {
        **{name: given[name] for name in ("seed", "resume", "logging")},
        "model": {
            "family": "qwen_image_edit",
            "path": "bases/qwen_image_edit",
            "dtype": "fp32",
            "max_sequence_length": 256,
        },
        "data": {"format": "manifest", "path": "data/edits/manifest.json", "resolution": 32},
        "rollout": {"num_steps": 1, "guidance_scale": 1.0, "batch_size_per_device": 8},
        "algorithm": {"name": "vlm_grpo", "trl": options},
        "rewards": {"preservation": {}, "completion_quality": {"weight": 0.5, "min_words": 1}},
        "training": {**given["training"], "max_steps": 6, "checkpoint_every": 2},
        "evaluation": {"num_examples": 2, "grid_examples": 0},
    }


CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "grpo-1": (grpo(1, algorithm=GRPO, model=model("flux_fill", LORA), ema=EMA), "SIGTERM", 4),
    "grpo-2": (grpo(2, 2, algorithm=DPPO, model=model("flux_fill", FULL)), "SIGKILL", 3),
    "nft-1": (run(1, algorithm=NFT, model=model("sd_inpaint", SMALL_LORA), ema=EMA), "SIGKILL", 4),
    "nft-2": (run(2, algorithm=NFT, model=model("flux_fill", LORA)), "SIGTERM", 5),
    "sft-1": (sft(1, model=model("sd_inpaint", SMALL_LORA)), "SIGTERM", 5),
    "sft-2": (sft(2, model=model("flux_fill", STYLE), ema=EMA), "SIGKILL", 5),
    "vlm_grpo-1": (vlm_grpo(1), "SIGKILL", 3),
    "vlm_grpo-2": (vlm_grpo(2), "SIGTERM", 3),
}
"""Run file, the signal that ends the run, and the step after which it comes; a name ends in the number of processes."""


def make(target: Path, name: str) -> None:
    """Write run file, run directory and end of a run."""
    section, signal, step = CASES[name]
    file = target / "run_files" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump({"name": name, **section}, sort_keys=False), encoding="utf-8")
    with tempfile.TemporaryDirectory() as room:
        folders = [Path(room, kind) for kind in ("stopped", "whole")]
        for folder in folders:
            for part in ("bases", "data", "run_files"):
                shutil.copytree(target / part, folder / part)
        stopped, whole = folders
        if train(stopped, name, signal, step).returncode == 0:
            raise RuntimeError(f"{name}: was not stopped")
        begun = shutil.copytree(stopped / "runs" / name, Path(room, "begun"), ignore=shutil.ignore_patterns(*LEFT_OUT))
        for folder in folders:
            done = train(folder, name)
            if done.returncode != 0:
                raise RuntimeError(f"{name}: {done.stderr}")
        resumed, expected = (Ended.of(folder / "runs" / name) for folder in (stopped, whole))
        if found := differences(expected, resumed.without_stops()):
            raise RuntimeError(f"{name}: is not resumed bitwise: {found}")
        shutil.rmtree(target / "runs" / name, ignore_errors=True)
        shutil.copytree(begun, target / "runs" / name)
        resumed.write(target / "ended" / name)


def write_data(folder: Path) -> None:
    write_signs(folder / "prompts", draw_words(4, "train", 2), SIZE, 2, with_targets=False, styled=True)
    write_signs(folder / "targets", draw_words(4, "train", 1), SIZE, 1, first_id=100)
    write_signs(folder / "held_out", draw_words(2, "held_out", 3), SIZE, 3, first_id=200)
    write_edits(folder / "edits", 6, "train", 3)


def about(commit: str, target: Path) -> dict[str, Any]:
    tree = subprocess.run(["git", "rev-parse", f"{commit}:src"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": commit,
        "src": tree.stdout.strip(),
        "machine": {
            "processor": f"{platform.machine()}, {processor()}",
            "capability": torch.backends.cpu.get_cpu_capability(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in PACKAGES},
        "arithmetic": digests(target / "bases"),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def main() -> None:
    arguments = argparse.ArgumentParser(description="Make the run directories of a commit.")
    arguments.add_argument("commit")
    arguments.add_argument("names", nargs="*", default=list(CASES))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if subprocess.run(["git", "diff", "--quiet", given.commit, "--", "src"], cwd=ROOT, check=False).returncode:
        sys.exit(f"src is not that of {given.commit}: make it in a checkout of that commit")
    target = HERE / given.commit
    file = target / "about.json"
    if not file.exists():
        write_bases(target / "bases")
        write_data(target / "data")
        (target / ".gitattributes").write_text("* -text\n", encoding="utf-8")  # their bytes are compared
        file.write_text(json.dumps(about(given.commit, target), indent=2) + "\n", encoding="utf-8")
    if json.loads(file.read_text(encoding="utf-8")) != about(given.commit, target):
        sys.exit(f"{file}: was made on another machine, or with other versions; all runs of a commit need the same")
    for name in given.names:
        make(target, name)


if __name__ == "__main__":
    main()
