"""Processor time and memory of an epoch, beside Flow-Factory and flow_grpo, on random small networks and a CPU.

    python benchmarks/peer_race.py --flow-factory CHECKOUT --flow-grpo CHECKOUT --out benchmarks/results/peer_race.json

Each side runs in a process of its own, one thread of torch each, through its own classes: ours `train_epoch` of the
recipe in a `Session`; Flow-Factory's `load_trainer`, `sample`, `prepare_feedback` and `optimize`; flow_grpo's `main`. A
first epoch warms up and is counted: rows that the network got without and with gradient (guidance twice), and text
tokens of a row. Then epochs alternate, ours, theirs, ours, theirs; `cpu_s` is user and system time of an epoch, and
the ratio is taken pair by pair: its median, and the interval of the order statistics that hold it with at least 95 %
where there are so many pairs. `peak_mib` is the largest size of the process, libraries included. Start, evaluation and
checkpoints are outside. Rewards of both are the mean of the pixels; LoRA of rank 32 and alpha 64 on the same modules,
AdamW, no EMA weights, no KL, fp32, 128 x 128 pixels, 16 images an epoch in batches of 8 (flow_grpo: 8). Networks have
blocks of width 192 (4 to 6 M parameters); SD3.5 has 77 tokens of CLIP and 256 of T5 (flow_grpo: 128), FLUX.1 512.

Changes to the peers from outside, none of which adds work: Flow-Factory's `txt_seq_lens`, which diffusers refuses, is
dropped, its autocast (bf16 even with `mixed_precision: no`) is off, there are no processes of a data loader, the start
of its Qwen template is counted by the toy tokenizer, and the network is wrapped once to count rows; flow_grpo logs to
a stub of wandb. Modules that it lists and that do not exist (`img_mlp.net.2.proj`) are left out on both sides.

Peers need packages that retouch does not: `--site FOLDER` with datasets 4.4.1, pyarrow 21, dill 0.4, imageio, einops,
ml_collections and absl-py (`pip install --target FOLDER`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
SIDE = 128
PROMPT = "a wide street with many signs, and on the largest of them in red letters stands the word "
OURS, THEIRS = "ours", "theirs"

Options = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Two runs with equal settings.

    Attributes:
        name: of the row.
        model: family of ours, and folder of the random model.
        peer: "flow-factory" or "flow_grpo".
        tokens: text tokens that the run files ask for.
        ours: keys of our run file, beside the common ones.
        theirs: sections of Flow-Factory's configuration, beside the common ones.
        images: of an epoch, half of each prompt.
    """

    name: str
    model: str
    tokens: int
    ours: Options = field(default_factory=dict[str, Any])
    theirs: Options = field(default_factory=dict[str, Any])
    peer: str = "flow-factory"
    prompt: str = PROMPT
    images: int = 16


def ode(count: int, **more: Any) -> Options:
    return {"num_steps": count, **more}


ONE = {"size": 1, "range": [0.1, 0.4]}
ONE_STEP = {"num_sde_steps": 1, "sde_steps": [1, 2, 3], "noise_level": 1.0, "dynamics_type": "Flow-SDE"}
CPS = {"num_sde_steps": 3, "sde_steps": [0, 1, 2, 3, 4], "noise_level": 0.8, "dynamics_type": "CPS"}
NFT = {"name": "nft", "sft_steps": 0, "timesteps_per_image": 4, "old_policy": "ramp_half", "kl_weight": 0}
THEIR_NFT = {"trainer_type": "nft", "num_train_timesteps": 4, "off_policy": True, "guidance_scale": 1.0}
THEIR_NFT |= {"ema_decay": 0.5, "ema_update_interval": 1}
NO_SDE = {"dynamics_type": "ODE"}
EXACT = {"exact_text_lengths": True}

ROWS = (
    Row(
        "qwen recipe: guidance 4, one stochastic step",
        "qwen_image",
        60,
        {"rollout": ode(10, guidance_scale=4.0, window=ONE), "model": EXACT},
        {"train": {"num_inference_steps": 10, "guidance_scale": 4.0}, "scheduler": ONE_STEP},
    ),
    Row(
        "qwen, no guidance, one stochastic step",
        "qwen_image",
        60,
        {"rollout": ode(10, guidance_scale=1.0, window=ONE), "model": EXACT},
        {"train": {"num_inference_steps": 10, "guidance_scale": 1.0}, "scheduler": ONE_STEP},
    ),
    Row(
        "fast: ours rollout.preset=fast, theirs no guidance, one stochastic step",
        "qwen_image",
        60,
        {"rollout": {"preset": "fast"}, "model": EXACT},
        {"train": {"num_inference_steps": 10, "guidance_scale": 1.0}, "scheduler": ONE_STEP},
    ),
    Row(
        "qwen, short prompts, no guidance, one stochastic step",
        "qwen_image",
        512,
        {"rollout": ode(10, guidance_scale=1.0, window=ONE), "model": EXACT},
        {"train": {"num_inference_steps": 10, "guidance_scale": 1.0}, "scheduler": ONE_STEP},
        prompt=PROMPT[-58:],
    ),
    Row(
        "qwen DiffusionNFT",
        "qwen_image",
        60,
        {"rollout": ode(14, guidance_scale=1.0), "algorithm": NFT, "optimizer": {"gradient_accumulation": 2}},
        {"train": {"num_inference_steps": 14, "gradient_step_per_epoch": 1, **THEIR_NFT}, "scheduler": NO_SDE},
    ),
    Row(
        "SD3.5 GRPO: CPS, 3 trained steps of 10",
        "sd3",
        256,
        {
            "rollout": ode(
                10, guidance_scale=1.0, step_rule="cps", noise_level=0.8, window={"size": 3, "range": [0, 0.5]}
            ),
            "algorithm": {"log_prob_mode": "cps"},
        },
        {"train": {"num_inference_steps": 10, "guidance_scale": 1.0}, "scheduler": CPS},
    ),
    Row(
        "SD3.5 DiffusionNFT",
        "sd3",
        256,
        {"rollout": ode(14, guidance_scale=1.0), "algorithm": NFT, "optimizer": {"gradient_accumulation": 2}},
        {"train": {"num_inference_steps": 14, "gradient_step_per_epoch": 1, **THEIR_NFT}, "scheduler": NO_SDE},
    ),
    Row(
        "FLUX.1 GRPO, one stochastic step",
        "flux_dev",
        512,
        {"rollout": ode(10, guidance_scale=3.5, window=ONE)},
        {"train": {"num_inference_steps": 10, "guidance_scale": 3.5}, "scheduler": ONE_STEP},
    ),
    Row(
        "flow_grpo SD3: guidance 4.5, 9 trained steps of 10",
        "sd3",
        128,
        {
            "rollout": ode(10, guidance_scale=4.5, noise_level=0.7),
            "algorithm": {"timestep_fraction": 0.9},
        },
        peer="flow_grpo",
        images=8,
    ),
)

ATTENTION = [
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
]
MODULES = {
    "qwen_image": [*ATTENTION, "img_mlp.net.0.proj", "txt_mlp.net.0.proj"],
    "sd3": ATTENTION,
    "flux_dev": [*ATTENTION, *(f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2"))],
}
"""Modules that both sides adapt: the peers' defaults, as far as they exist."""

THEIR_NAME = {"qwen_image": "qwen-image", "sd3": "sd3-5", "flux_dev": "flux1"}


# --- the race ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow-factory", type=Path)
    parser.add_argument("--flow-grpo", type=Path)
    parser.add_argument("--site", type=Path, help="folder with the packages of the peers")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names of rows")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--work", type=Path, help="folder for models and data")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the sides end, too
    with tempfile.TemporaryDirectory() as made:
        arguments.work = (arguments.work or Path(made)).resolve()
        for row in ROWS:
            if checkout(row, arguments) is None or not any(part in row.name for part in arguments.rows):
                continue
            measured = race(row, arguments)
            print(line(measured), flush=True)
            if arguments.out:
                add(measured, arguments)


def checkout(row: Row, arguments: argparse.Namespace) -> Path | None:
    """The peer's code; None where it was not given."""
    return arguments.flow_factory if row.peer == "flow-factory" else arguments.flow_grpo


def race(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """Epochs of both sides in turns."""
    with runner(OURS, row, arguments) as ours, runner(THEIRS, row, arguments) as theirs:
        first = {OURS: ours(), THEIRS: theirs()}
        epochs: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
        for _ in range(arguments.pairs):
            epochs[OURS].append(ours())
            epochs[THEIRS].append(theirs())
    seconds = {side: [epoch["cpu_s"] for epoch in found] for side, found in epochs.items()}
    peaks = {side: max(epoch["peak_mib"] for epoch in found) for side, found in epochs.items()}
    ratios = sorted(a / b for a, b in zip(seconds[OURS], seconds[THEIRS], strict=True))
    decoder = {side: [epoch["decoder_s"] for epoch in found] for side, found in epochs.items()}
    bare = sorted(without_decoder(epochs))
    counts = ("rows", "trained_rows", "text")
    return {
        "row": row.name,
        "peer": row.peer,
        "pairs": arguments.pairs,
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(value, 3) for value in interval(ratios)],
        "ratio_without_decoder": round(statistics.median(bare), 3),
        "interval_without_decoder": [round(value, 3) for value in interval(bare)],
        "cpu_s": {side: round(statistics.median(taken), 3) for side, taken in seconds.items()},
        "decoder_s": {side: round(statistics.median(taken), 3) for side, taken in decoder.items()},
        "peak_mib": peaks,
        "memory": round(peaks[OURS] / peaks[THEIRS], 3),
        "forwards": {side: {name: counted[name] for name in counts} for side, counted in first.items()},
        "rows_of_epochs": {
            side: [[epoch["rows"], epoch["trained_rows"]] for epoch in found] for side, found in epochs.items()
        },
    }


def without_decoder(epochs: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Ratios, pair by pair, of the time outside of the autoencoder."""
    ours, theirs = ([e["cpu_s"] - e["decoder_s"] for e in epochs[side]] for side in (OURS, THEIRS))
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The order statistics that hold the median with at least 95 %, as tight as there are; all of fewer than six."""
    count = len(ratios)
    for skipped in range(count // 2, -1, -1):
        outside = 2 * sum(comb(count, k) for k in range(skipped + 1)) / 2**count
        if outside <= 0.05:
            return ratios[skipped], ratios[count - 1 - skipped]
    return ratios[0], ratios[-1]


@contextlib.contextmanager
def runner(side: str, row: Row, arguments: argparse.Namespace) -> Iterator[Callable[[], dict[str, Any]]]:
    """A process that runs an epoch at each call and says what it took."""
    command = [sys.executable, __file__, "--worker", side, row.name, "--work", str(arguments.work)]
    for option, path in {"--flow-factory": arguments.flow_factory, "--flow-grpo": arguments.flow_grpo}.items():
        command += [] if path is None else [option, str(path.resolve())]
    paths = [HERE.parent / "src", HERE]
    if side == THEIRS:
        code = checkout(row, arguments)
        assert code is not None
        paths += [code / "src" if row.peer == "flow-factory" else code, *([arguments.site] if arguments.site else [])]
    where = os.pathsep.join(str(Path(path).resolve()) for path in paths)
    environment = {**os.environ, "PYTHONPATH": where, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin and process.stdout

    def epoch() -> dict[str, Any]:
        assert process.stdin and process.stdout
        process.stdin.write("epoch\n")
        process.stdin.flush()
        for text in process.stdout:  # a peer may print as well
            if text.startswith(MARK):
                return json.loads(text.removeprefix(MARK))
        raise SystemExit(f"{side} of {row.name}: ended with {process.wait()}")

    try:
        yield epoch
    finally:
        process.kill()
        process.wait()


def line(row: dict[str, Any]) -> str:
    return f"{table([row])[0]} {row['cpu_s']} s, {row['forwards']}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of docs/speed.md."""
    return [
        f"| {row['row']} | {row['pairs']} | {shown(row['ratio'], row['interval'])} | "
        f"{shown(row['ratio_without_decoder'], row['interval_without_decoder'])} | {row['memory']:.2f} |"
        for row in rows
    ]


def shown(value: float, between: Sequence[float]) -> str:
    return f"{value:.2f} [{between[0]:.2f}, {between[1]:.2f}]"


def add(row: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write a row beside what the file has."""
    from loop_overhead import machine

    out: Path = arguments.out
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    rows = [one for one in found["rows"] if one["row"] != row["row"]] + [row]
    names = [one.name for one in ROWS]
    commits = {
        name: subprocess.check_output(["git", "-C", str(path), "rev-parse", "--short=7", "HEAD"], text=True).strip()
        for name, path in {"flow-factory": arguments.flow_factory, "flow_grpo": arguments.flow_grpo}.items()
        if path is not None and name in {one["peer"] for one in rows}
    }
    found = {
        "machine": machine(),
        "peers": found.get("peers", {}) | commits,
        "rows": sorted(rows, key=lambda one: names.index(one["row"])),
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


# --- a side ---

MARK = "EPOCH "


def serve(arguments: argparse.Namespace) -> None:
    """Run an epoch for every line of standard input."""
    import torch

    torch.set_num_threads(1)
    side, name = arguments.worker
    row = next(one for one in ROWS if one.name == name)
    model, prompts = make_inputs(row, arguments.work)
    counter, code = Counter(), checkout(row, arguments)
    between = Boundary(counter)
    shutil.rmtree(arguments.work / side, ignore_errors=True)  # the run of another row
    given = row, model, prompts, arguments.work / side, counter, between
    if side == OURS:
        run_ours(*given)
    elif row.peer == "flow-factory":
        run_flow_factory(*given)
    else:
        assert code is not None
        run_flow_grpo(*given, code)


class Boundary:
    """Called between two epochs: prints what the last one took, and waits for a line of standard input."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.before: float | None = None

    def __call__(self) -> None:
        if self.before is not None:
            taken = {"cpu_s": usage() - self.before, **self.counter.found()}
            taken["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            print(MARK + json.dumps(taken), flush=True)
        if not sys.stdin.readline():
            raise SystemExit
        self.counter.clear()
        self.before = usage()


def usage() -> float:
    taken = resource.getrusage(resource.RUSAGE_SELF)
    return taken.ru_utime + taken.ru_stime


class Counter:
    """Rows and text tokens of the network's forwards, and processor time of the autoencoder, by hooks."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows = self.trained = 0
        self.text: set[int] = set()
        self.decoder = 0.0

    def found(self) -> dict[str, Any]:
        return {
            "rows": self.rows, "trained_rows": self.trained, "text": sorted(self.text), "decoder_s": self.decoder,
        }  # fmt: skip

    def watch(self, network: Any, decoder: Any) -> None:
        """Count the forwards of a network and the time of `decoder.decode`."""
        network.register_forward_pre_hook(self._forward, with_kwargs=True)
        decode = decoder.decode

        def timed(*given: Any, **options: Any) -> Any:
            before = usage()
            try:
                return decode(*given, **options)
            finally:
                self.decoder += usage() - before

        decoder.decode = timed

    def _forward(self, network: Any, args: Any, given: dict[str, Any]) -> None:
        import torch

        rows, tokens = given["encoder_hidden_states"].shape[:2]
        self.text.add(tokens)
        if torch.is_grad_enabled():
            self.trained += rows
        else:
            self.rows += rows


def make_inputs(row: Row, work: Path) -> tuple[Path, Path]:
    """Folder of a random model, and a folder with train.txt of two prompts (and test.txt for flow_grpo, which wants
    one); written once."""
    model, prompts = work / row.model, work / f"prompts-{row.peer}-{len(row.prompt)}"
    prompts.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test") if row.peer == "flow_grpo" else ("train",):
        (prompts / f"{name}.txt").write_text("".join(f"{row.prompt}{word}\n" for word in "AB"), encoding="utf-8")
    if not (model / "model_index.json").exists():
        make_model(row.model).save_pretrained(model)
    return model, prompts


def make_model(family: str) -> Any:
    """A pipeline of the family: blocks of width 192 on an autoencoder that downsamples by 8."""
    import torch
    from diffusers import AutoencoderKL, AutoencoderKLQwenImage

    from retouch.families.tiny import tiny_pipeline

    torch.manual_seed(0)
    pipe: Any = tiny_pipeline(family)
    config = dict(pipe.transformer.config) | {"num_attention_heads": 3, "attention_head_dim": 64}
    latents: Any = {"in_channels": 64, "axes_dims_rope": (16, 24, 24)}
    sizes: dict[str, Options] = {
        "qwen_image": {**latents, "out_channels": 16, "num_layers": 3},
        "sd3": {"num_layers": 3, "caption_projection_dim": 192, "dual_attention_layers": (), "in_channels": 16},
        "flux_dev": {**latents, "out_channels": 64, "num_layers": 2, "num_single_layers": 6},
    }
    network = type(pipe.transformer).from_config(config | sizes[family])
    if family == "qwen_image":
        vae: Any = AutoencoderKLQwenImage(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        )
    else:
        levels: Any = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        vae = AutoencoderKL(
            **levels, block_out_channels=(16, 16, 32, 32), layers_per_block=1, latent_channels=16, norm_num_groups=4,
            use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.0, shift_factor=0.0,
            mid_block_add_attention=False,
        )  # fmt: skip
    for name in ("tokenizer_2", "tokenizer_3"):
        if type(getattr(pipe, name, None)).__name__ == "ByT5Tokenizer":
            getattr(pipe, name).model_max_length = 512
    made = {"transformer": network, "vae": vae}
    if family == "sd3":  # flow_grpo pads to 77 tokens of CLIP
        for name in ("text_encoder", "text_encoder_2"):
            encoder = getattr(pipe, name)
            encoder.config.max_position_embeddings = 77
            made[name] = type(encoder)(encoder.config)
            getattr(pipe, name.replace("text_encoder", "tokenizer")).model_max_length = 77
    return type(pipe)(**{**pipe.components, **made})


def run_ours(row: Row, model: Path, prompts: Path, work: Path, counter: Counter, between: Boundary) -> None:
    """Epochs of the recipe."""
    from epochs import epochs
    from loop_overhead import NoRewards

    from retouch.config import parse_run
    from retouch.rewards.table import Scores
    from retouch.training.build import build
    from retouch.training.session import Session
    from retouch.types import Score

    class Pixels(NoRewards):
        """Scores that are there at once: the mean of the pixels of each image."""

        def submit(self, items: Sequence[Any], *, broken: Collection[int] = (), **_: Any) -> Scores:
            means = [float(item.image.mean()) / 255 for item in items]
            return Scores({"jpeg_size": [Score(mean) for mean in means]}, {"jpeg_size": 1.0}, items, broken)

    run = build(parse_run(our_file(row, model, prompts / "train.txt", work)))
    run.rewards = Pixels(run.rewards)  # type: ignore[assignment]
    counter.watch(run.model.network, run.model)
    with Session(run) as session:
        if row.ours.get("algorithm", {}).get("name") == "nft":
            run.policy.snapshot("old")
        epoch = epochs(session)
        while True:
            between()
            epoch()


def our_file(row: Row, model: Path, prompts: Path, work: Path) -> Options:
    """Our run file."""
    common: Options = {
        "name": "race",
        "model": {
            "family": row.model, "path": str(model), "dtype": "fp32", "max_sequence_length": row.tokens,
            "offload_text_encoders": False,
            "train": {"kind": "lora", "rank": 32, "alpha": 64, "targets": MODULES[row.model]},
        },
        "data": {"format": "prompts", "path": str(prompts), "resolution": SIDE},
        "rollout": {"group_size": row.images // 2, "global_groups_per_batch": 2, "batch_size_per_device": 8},
        "algorithm": {"name": "grpo", "sft_steps": 0, "kl_weight": 0},
        "rewards": {"jpeg_size": {}},
        "optimizer": {"lr": 3e-4, "batch_size_per_device": 8, "gradient_accumulation": 1},
        "training": {
            "max_steps": 10**6, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {"num_examples": 1, "grid_examples": 0},
        "logging": {"dir": str(work), "sinks": []},
    }  # fmt: skip
    return {name: {**section, **row.ours.get(name, {})} if isinstance(section, dict) else section
            for name, section in common.items()}  # fmt: skip


def run_flow_factory(row: Row, model: Path, prompts: Path, work: Path, counter: Counter, between: Boundary) -> None:
    """Epochs of Flow-Factory's trainer."""
    from diffusers import QwenImageTransformer2DModel
    from flow_factory.hparams import Arguments  # type: ignore[import-not-found]
    from flow_factory.models.qwen_image.qwen_image import QwenImageAdapter  # type: ignore[import-not-found]
    from flow_factory.trainers import load_trainer  # type: ignore[import-not-found]

    from retouch.families.qwen.text import prefix_length

    forward, load = QwenImageTransformer2DModel.forward, QwenImageAdapter.load_pipeline

    def without_lengths(self: Any, *given: Any, txt_seq_lens: Any = None, **options: Any) -> Any:
        return forward(self, *given, **options)

    def with_its_prefix(self: Any) -> Any:
        pipe = load(self)
        pipe.prompt_template_encode_start_idx = prefix_length(pipe.tokenizer, "draw")
        return pipe

    QwenImageTransformer2DModel.forward = without_lengths  # type: ignore[method-assign]
    QwenImageAdapter.load_pipeline = with_its_prefix
    trainer = load_trainer(Arguments.from_dict(their_file(row, model, prompts, work)))
    trainer.autocast = contextlib.nullcontext
    adapter = trainer.adapter
    counter.watch(adapter.pipeline.transformer, adapter.pipeline.vae)
    while True:
        between()
        adapter.scheduler.set_seed(trainer.epoch + trainer.training_args.seed)
        with trainer.sampling_context() if hasattr(trainer, "sampling_context") else contextlib.nullcontext():
            samples = trainer.sample()
        trainer.prepare_feedback(samples)
        trainer.optimize(samples)
        adapter.ema_step(step=trainer.epoch)
        trainer.epoch += 1


def their_file(row: Row, model: Path, prompts: Path, work: Path) -> Options:
    """Flow-Factory's configuration."""
    common: Options = {
        "mixed_precision": "no",
        "data": {
            "dataset_dir": str(prompts), "cache_dir": str(work / "cache"), "dataloader_num_workers": 0,
            "preprocessing_batch_size": 8, "force_reprocess": True,
        },
        "model": {
            "finetune_type": "lora", "lora_rank": 32, "lora_alpha": 64, "target_modules": MODULES[row.model],
            "model_name_or_path": str(model), "model_type": THEIR_NAME[row.model], "master_weight_dtype": "fp32",
        },
        "log": {"run_name": "race", "logging_backend": "none", "save_dir": str(work), "save_freq": 0, "verbose": False},
        "train": {
            "trainer_type": "grpo", "resolution": SIDE, "per_device_batch_size": 8, "group_size": row.images // 2,
            "unique_sample_num_per_epoch": 2, "gradient_step_per_epoch": 2, "learning_rate": 3e-4, "kl_beta": 0,
            "ema_decay": 0, "ema_device": "cpu", "ref_param_device": "cpu", "max_sequence_length": row.tokens,
            "latent_storage_dtype": "fp32", "enable_gradient_checkpointing": False,
        },
        "scheduler": {},
        "eval": {"eval_freq": 0, "resolution": SIDE},
        "rewards": [
            {"name": "pixels", "reward_model": "peer_pixels.Pixels", "device": "cpu", "dtype": "float32"},
        ],
    }  # fmt: skip
    return {name: {**section, **row.theirs.get(name, {})} if isinstance(section, dict) else section
            for name, section in common.items()}  # fmt: skip


def run_flow_grpo(
    row: Row, model: Path, prompts: Path, work: Path, counter: Counter, between: Boundary, code: Path
) -> None:
    """Epochs of flow_grpo's script for SD3. Its evaluation, which it calls before each epoch, is the boundary."""
    import diffusers
    import peft  # noqa: F401  # before the stub, which it would take for an installed wandb
    import torch

    stub: Any = ModuleType("wandb")
    stub.init, stub.log, stub.Image = mock.Mock(), mock.Mock(), mock.Mock()
    sys.modules["wandb"] = stub
    base = loaded("base", code / "config/base.py").get_config()
    script = loaded("train_sd3", code / "scripts/train_sd3.py")
    sampling = {"train_batch_size": row.images, "num_image_per_prompt": row.images // 2, "num_batches_per_epoch": 1}
    sections: dict[str, Options] = {
        "sample": {**sampling, "num_steps": 10, "guidance_scale": 4.5, "noise_level": 0.7},
        "train": {"batch_size": row.images, "timestep_fraction": 0.99, "beta": 0.0},
        "pretrained": {"model": str(model)},
    }
    for name, options in sections.items():
        base[name].update(options)
    base.update(mixed_precision="no", resolution=SIDE, eval_freq=1, save_freq=10**6, prompt_fn="general_ocr")
    base.update(dataset=str(prompts), logdir=str(work), allow_tf32=False)

    def pixels(images: Any, *_: Any, **__: Any) -> Any:
        return {"avg": torch.as_tensor(images).float().mean((1, 2, 3))}, {}

    def watched(*given: Any, **options: Any) -> Any:
        pipe = load(*given, **options)
        counter.watch(pipe.transformer, pipe.vae)
        return pipe

    load = diffusers.StableDiffusion3Pipeline.from_pretrained
    script.StableDiffusion3Pipeline = mock.Mock(from_pretrained=watched)
    script.DataLoader = lambda *given, **options: torch.utils.data.DataLoader(*given, **{**options, "num_workers": 0})
    script.flow_grpo.rewards.multi_score = lambda *_: pixels
    script.eval = lambda *_, **__: between()
    script.FLAGS = mock.Mock(config=base)
    script.main(None)


def loaded(name: str, file: Path) -> Any:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
