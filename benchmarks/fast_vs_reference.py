"""What does `rollout.preset: fast` save, and what does it cost? Runs on the same images and updates, beside each other.

Two tiny bases under LoRA: `colours` (benchmarks/colours.py), a qwen_image whose guidance is two forwards, and the
package's flux_fill, whose guidance is embedded. The runs of a base and seed are trained side by side in one process, an
epoch of one after an epoch of the other: as many images, one update each; then the ratio of their times, rewards and
decoding included. Forward-equivalents are those that the network was called for (`retouch.observe.cost`); a backward
of a frozen network counts as one.

    reference   rollout.preset=reference
    published   a window of 3 steps out of 10, neither guidance nor KL: the published fast recipe (Flow-GRPO-Fast)
    fast        rollout.preset=fast

Runs of `colours` are then evaluated with one solver on pairs of the same prompt and noise, twice: all of them at the
guidance scale of the model (`one_sampler`), and each at the scale that it was trained under (`as_trained`), as it would
be used: fast and published without guidance, in half the forwards. Trained on is a shape of the right colour and of a
size that the base learned (right_colour leaves the size out); that the picture is one of those that the base learned to
draw (gold) is seen in the evaluation alone.

    python benchmarks/fast_vs_reference.py --out benchmarks/results/fast_vs_reference.json
    python benchmarks/fast_vs_reference.py --table --out benchmarks/results/fast_vs_reference.json

What is there is not run again: rows of --out that are not asked for, or were there, stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import colours
import torch
from epochs import epochs
from loop_overhead import machine, timed

from retouch.config import RunConfig, parse_run
from retouch.observe import Stopwatch
from retouch.observe.run_dir import read_metrics
from retouch.observe.statistics import paired_difference
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training.build import (
    Run,
    build,
)
from retouch.training.evaluation import evaluate
from retouch.training.session import Session

PRESETS: dict[str, dict[str, Any]] = {
    "reference": {"preset": "reference"},
    "published": {"num_steps": 10, "guidance_scale": 1.0, "window": {"size": 3}},
    "fast": {"preset": "fast"},
}
FAST = "fast"

SIGNS = (32, 64)
"""Size in pixels of the pictures that the tiny flux_fill learned."""

GROUP = 8

MEASURES = ("reward", "gold")

QUALITIES = tuple((sampler, measure) for sampler in ("one_sampler", "as_trained") for measure in MEASURES)

COLUMNS = (
    "base",
    "against",
    "forwards per image",
    "fewer forwards",
    "less wall time",
    "reward, one sampler",
    "gold, one sampler",
    "reward, as trained",
    "gold, as trained",
)

Row = dict[str, Any]

Measured = dict[str, dict[str, list[float]]]
"""Sampler -> measure -> a number for every picture of an evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--updates", type=int, default=100, help="of each run of colours")
    parser.add_argument("--groups", type=int, default=12, help="of 8 images, in an update")
    parser.add_argument("--pairs", type=int, default=512, help="images of the evaluation")
    parser.add_argument("--solver-steps", type=int, default=10, help="of the evaluation")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--flux-updates", type=int, default=4, help="of flux_fill, of which costs alone are measured")
    parser.add_argument("--reward", choices=["right_shape", "right_colour"], default="right_shape", help="of colours")
    parser.add_argument("--base", type=Path, help="folder of the base of colours; null builds it anew")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--table", action="store_true", help="print what --out holds, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    rows: list[Row] = known.get("rows", [])
    if rows and not arguments.table and known["settings"] != settings(arguments):
        parser.error(f"{arguments.out}: its rows are of other settings, {known['settings']}; give another file")
    if arguments.table:
        print(table(rows))
        return
    wanted = [("colours", seed) for seed in arguments.seeds] + [("flux_fill", 0)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_inputs(work, arguments)
        for base, seed in wanted:
            if any((row["base"], row["seed"]) == (base, seed) for row in rows):
                continue
            rows.append(side_by_side(base, seed, arguments, work))
            if arguments.out:
                text = json.dumps({"machine": machine(), "settings": settings(arguments), "rows": rows}, indent=1)
                arguments.out.write_text(text + "\n", encoding="utf-8")
    print(table(rows))


def settings(arguments: argparse.Namespace) -> Row:
    """What the runs have in common."""
    kept = ("updates", "groups", "pairs", "solver_steps", "lr", "flux_updates", "reward")
    return {name: getattr(arguments, name) for name in kept} | {"group_size": GROUP}


def make_inputs(work: Path, arguments: argparse.Namespace) -> None:
    """The base, prompts to train on and prompts to evaluate on."""
    if arguments.base is None:
        colours.build_base(work / "colours")
    else:
        (work / "colours").symlink_to(arguments.base.resolve())
    colours.write_prompts(work / "train.json", "train", 512)
    colours.write_prompts(work / "held_out.json", "held_out", arguments.pairs)
    write_signs(work / "signs", draw_words(256, "train", 1), SIGNS, 1)


def side_by_side(base: str, seed: int, arguments: argparse.Namespace, work: Path) -> Row:
    """Train all runs of a base, an epoch of each in turn; evaluate those of colours, and what they began with."""
    evaluates = base == "colours"
    updates = arguments.updates if evaluates else arguments.flux_updates
    with ExitStack() as stack:
        runs = {name: build(run_file(base, name, seed, arguments, work)) for name in PRESETS}
        for run in runs.values():
            stack.callback(run.close)
        sessions = {name: stack.enter_context(Session(run)) for name, run in runs.items()}
        # with the guidance of fast, published begins as it does
        before = {n: measured(runs[n], arguments)["as_trained"] for n in ("reference", FAST)} if evaluates else {}
        for session in sessions.values():
            if session.config.algorithm.kl_weight:  # type: ignore[union-attr]
                session.run.policy.snapshot("reference")
        taken = {name: epochs(session) for name, session in sessions.items()}
        for epoch in taken.values():
            epoch()  # encodes its prompts
        times = [{name: timed(epoch) for name, epoch in taken.items()} for _ in range(updates - 1)]
        after = {name: measured(run, arguments) for name, run in runs.items()} if evaluates else {}
        return {
            "base": base,
            "seed": seed,
            "runs": {name: described(run, [t[name] for t in times]) for name, run in runs.items()},
            "fast_against": {name: compared(name, runs, times, after) for name in PRESETS if name != FAST},
            "before": {name: means(columns) for name, columns in before.items()},
            "after": {n: {s: means(columns) for s, columns in found.items()} for n, found in after.items()},
        }


def measured(run: Run, arguments: argparse.Namespace) -> Measured:
    """Reward and gold of every picture of the evaluation under each sampler."""
    scales = {"one_sampler": run.model.spec.guidance_scale, "as_trained": run.guidance_scale}
    made = {scale: drawn(run, scale, arguments) for scale in set(scales.values())}
    return {sampler: made[scale] for sampler, scale in scales.items()}


def drawn(run: Run, scale: float, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Reward and gold of every picture at a guidance scale."""
    steps, examples = arguments.solver_steps, run.eval_data[:]
    with run.clock.part("eval"):  # or its forwards would count as a rollout's
        found = evaluate(run.model, run.network, examples, 1, steps, scale, 64, run.rewards, Stopwatch())
    return {measure: [float(row[measure]) for row in found.rows] for measure in MEASURES}


def means(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {measure: round(fmean(column), 4) for measure, column in columns.items()}


def described(run: Run, times: Sequence[tuple[float, float]]) -> Row:
    """Exact settings, and what was counted."""
    config = run.config
    parts = {part: round(count, 3) for part, count in forwards(run).items()}
    return {
        "rollout": config.rollout.model_dump(mode="json", exclude_defaults=True) | {"guidance": run.guidance_scale},
        "algorithm": config.algorithm.model_dump(mode="json", exclude_defaults=True),
        "forwards_per_image": {**parts, "all": round(sum(forwards(run).values()), 3)},
        "update_s": [round(median(column), 4) for column in zip(*times, strict=True)],
    }


def forwards(run: Run) -> dict[str, float]:
    """Forward-equivalents of an image by what asked for them."""
    records = [r["time"] for r in read_metrics(run.dir.path / "metrics.jsonl") if r["kind"] == "train"]
    images = sum(record["images"] for record in records)
    parts = ("rollout", "train_forward", "train_backward")
    return {part: sum(record.get(f"nfe_{part}", 0.0) for record in records) / images for part in parts}


def compared(
    other: str,
    runs: Mapping[str, Run],
    times: Sequence[Mapping[str, tuple[float, float]]],
    after: Mapping[str, Measured],
) -> Row:
    """How much less the fast run took than another, and how its pictures compare: the number of pairs, the sum of their
    differences and that of the squares."""
    row: Row = {"forwards": round(sum(forwards(runs[other]).values()) / sum(forwards(runs[FAST]).values()), 3)}
    for title, clock in (("wall", 0), ("process", 1)):
        ratios = sorted(t[other][clock] / t[FAST][clock] for t in times)
        row[title] = round(median(ratios), 3)
        row[f"{title}_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    for sampler, measure in QUALITIES if after else ():
        columns = after[FAST][sampler][measure], after[other][sampler][measure]
        pairs = [a - b for a, b in zip(*columns, strict=True)]
        row[f"{measure}_{sampler}"] = [len(pairs), round(sum(pairs), 6), round(sum(d * d for d in pairs), 6)]
    return row


def over_seeds(rows: Sequence[Row], other: str, measure: str) -> tuple[float, float, float]:
    """Mean over the seeds of fast minus the other, and its 95 % interval by Student's t: what another seed may show.
    Not over pictures: those of a seed are of one trained network and of few prompts, and are not independent."""
    means = [total / n for n, total, _ in (row["fast_against"][other][measure] for row in rows)]
    return paired_difference(means, [0.0] * len(means))


def table(rows: Sequence[Row]) -> str:
    """Markdown: fast against the others, over seeds."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for base in dict.fromkeys(row["base"] for row in rows):
        mine = [row for row in rows if row["base"] == base]
        for other in mine[0]["fast_against"]:
            against = [row["fast_against"][other] for row in mine]
            costs = [fmean(row["runs"][name]["forwards_per_image"]["all"] for row in mine) for name in (other, FAST)]
            quality = [_interval(mine, other, f"{measure}_{sampler}") for sampler, measure in QUALITIES]
            lines.append(
                f"| {base} | {other} | {costs[0]:.1f} → {costs[1]:.1f} | {costs[0] / costs[1]:.2f} x | "
                f"{median(a['wall'] for a in against):.2f} x | {' | '.join(quality)} |"
            )
    return "\n".join(lines)


def _interval(rows: Sequence[Row], other: str, measure: str) -> str:
    if measure not in rows[0]["fast_against"][other]:
        return "not measured"
    mean, low, high = over_seeds(rows, other, measure)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def run_file(base: str, name: str, seed: int, arguments: argparse.Namespace, work: Path) -> RunConfig:
    """A run: everything but `rollout`, and what its preset says of `algorithm`, is the same for all of a base."""
    groups = arguments.groups
    rollout = {**PRESETS[name], "group_size": GROUP, "global_groups_per_batch": groups}
    sections = colours_sections(work, arguments.reward) if base == "colours" else flux_sections(work, rollout)
    optimizer = {"lr": arguments.lr, "batch_size_per_device": GROUP * groups // 2, "gradient_accumulation": 2}
    return parse_run(
        {
            "name": f"{base}-{name}-{seed}",
            "seed": seed,
            "rollout": {**rollout, "batch_size_per_device": GROUP * groups},
            "algorithm": {"name": "grpo", "clip_range": 2e-3},
            "optimizer": optimizer,
            "training": {
                "max_steps": 10_000,
                "checkpoint_every": 0,
                "eval_every": 0,
                "mixed_precision": "no",
                "gradient_checkpointing": False,
            },
            "logging": {"dir": str(work / "runs"), "sinks": []},
            **sections,
        }
    )


def colours_sections(work: Path, reward: str) -> dict[str, Any]:
    data = {"format": "prompts", "resolution": colours.SIDE}
    scorer = {"scorer": "fn"}
    return {
        "model": {
            "family": "qwen_image",
            "path": str(work / "colours"),
            "dtype": "fp32",
            "max_sequence_length": colours.TEXT_TOKENS,
            "train": {"kind": "lora", "rank": 16, "alpha": 16},
        },
        "data": {**data, "path": str(work / "train.json")},
        "rewards": {
            "reward": {**scorer, "fn": f"colours:{reward}"},
            "gold": {**scorer, "fn": "colours:clean", "role": "gold"},
        },
        "evaluation": {
            "data": {**data, "path": str(work / "held_out.json")},
            "num_examples": 1,
            "grid_examples": 0,
        },
    }


def flux_sections(work: Path, rollout: dict[str, Any]) -> dict[str, Any]:
    """Rewards and evaluation are nothing here: costs alone are measured."""
    rollout.pop("guidance_scale", None)  # embedded: the same forwards at any scale
    return {
        "model": {
            "family": "flux_fill",
            "path": "tiny",
            "dtype": "fp32",
            "max_sequence_length": 24,
            "train": {"kind": "lora", "rank": 16, "alpha": 16},
        },
        "data": {"format": "self_bench", "path": str(work / "signs"), "resolution": list(SIGNS)},
        "rewards": {"preservation": {}},
        "evaluation": {"num_examples": 1, "grid_examples": 0},
    }


if __name__ == "__main__":
    main()
