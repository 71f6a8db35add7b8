"""How many forwards a reward gradient needs for the NED of DiffusionNFT, and what supervised steps reach with as many.

Runs of the published file of configs/tiny, on the data and with the evaluation of benchmarks/algorithms.py, evaluated
every four steps, three seeds. They are compared with the best setting of benchmarks/nft.py (KL .1) at one seed: its
NED after 80 steps, and the first evaluation of either run that reaches a NED. Forwards are those of RL, the supervised
warm-up excluded, which is the same in both.

The control has supervised steps on more knowledge than the recogniser has: pictures of the very words that RL samples,
in the fonts of the signs, with right captions, for as many forwards.

    python benchmarks/reward_gradient.py --nft runs/nft --out benchmarks/results/reward_gradient.json
    python benchmarks/reward_gradient.py --plot docs/images/forwards.svg --out benchmarks/results/reward_gradient.json

`--nft` is the --work of benchmarks/nft.py, whose runs are read. A finished run is not repeated, an interrupted one is
resumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from figures import label_ends, style
from inputs import inputs

from algorithms import ALGORITHMS, MEASURES, REPOSITORY, Row, evaluations, make_data, measured, retouch, write
from retouch.config import derive, load_run
from retouch.observe.run_dir import read_metrics
from retouch.use.comparison import gains

FILE = REPOSITORY / "configs/tiny/flux_fill_reward_gradient.yaml"
SUPERVISED = REPOSITORY / "configs/tiny/flux_fill_sft.yaml"
RATES = (1e-4, 3e-4, 1e-3)
"""Learning rates of the control."""

REACHED = 0.8
"""NED to which forwards are counted."""

IMAGES, WARMUP = 96, 96 * 20
"""Images of an optimizer step, and of the supervised warm-up, of the other algorithms and of the control."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/reward-gradient"), help="folder for data and runs")
    parser.add_argument("--nft", type=Path, default=Path("runs/nft"), help="--work of benchmarks/nft.py")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--plot", type=Path, help="draw and print what --out holds, run nothing")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    if arguments.plot:
        plot(rows, others(), arguments.plot)
    else:
        data = arguments.work / "data"
        make_data(data)
        make_pictures(data)
        for seed in arguments.seeds:
            made = [trained(seed, data, arguments.work, arguments.nft)]
            made += [supervised(seed, rate, made[0]["forwards"], data, arguments.work) for rate in RATES]
            rows = sorted([r for r in rows if r["seed"] != seed] + made, key=lambda r: (r["arm"], r["run"]))
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows), reached_table([*rows, *others()]), sep="\n\n")


def make_pictures(data: Path) -> None:
    """The words of the folder `prompts` with their pictures."""
    if not (data / "pictures" / "self_bench.txt").exists():
        retouch("data", "synth", "--out", f"{data}/pictures", "--count", "2000", "--seed", "1")


def trained(seed: int, data: Path, work: Path, nft: Path) -> Row:
    """The published run file with a seed, and NFT's run of that seed."""
    name = f"reward_gradient-{seed}"
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "training.eval_every=4", "resume=auto"]
    retouch("train", str(FILE), *options, DATA_PATH=str(data))
    row = row_of("reward gradient", seed, work / name, derive(load_run(FILE)).forwards_per_image)
    theirs = nft / f"flux_fill-nft-full-{seed}-kl0.1"
    apart = gains(evaluations(work / name)["last"], evaluations(theirs)["last"])
    known = next(r for r in nft_rows() if r["seed"] == seed)
    forwards = known["counted"] * (known["images_seen"] - WARMUP)
    row["nft"] = {
        "forwards": round(forwards),
        "held_out": known["held_out"]["last"],
        "over": {measure: [round(v, 4) for v in apart[measure]] for measure in MEASURES},
        "share_of_forwards": round(row["forwards"] / forwards, 4),
        "forwards_to_its_ned": forwards_to(row["points"], known["held_out"]["last"]["ocr.ned"]),
    }
    return row | {"inputs": inputs(FILE)}


def supervised(seed: int, rate: float, forwards: float, data: Path, work: Path) -> Row:
    """Supervised steps on right captions, for as many forwards."""
    each = derive(load_run(SUPERVISED)).forwards_per_image
    steps = round(forwards / each / IMAGES)
    name = f"supervised-{rate:g}-{seed}"
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", f"data.path={data}/pictures"]
    options += [f"training.max_steps={steps}", "training.eval_every=0", f"optimizer.lr={rate}"]
    retouch("train", str(SUPERVISED), *options, DATA_PATH=str(data))
    return row_of(f"supervised, lr {rate:g}", seed, work / name, each) | {"inputs": inputs(SUPERVISED)}


def row_of(arm: str, seed: int, run: Path, forwards_per_image: float) -> Row:
    """What a run reached, and `points`: the forwards after the warm-up and the NED of every evaluation."""
    found = measured(run, forwards_per_image)
    config, records = load_run(run / "config.yaml"), read_metrics(run / "metrics.jsonl")
    images = config.optimizer.rows_per_step(1)
    warmup = getattr(config.algorithm, "sft_steps", 0)
    points = {
        round(images * forwards_per_image * (r["step"] - warmup)): round(r["ocr.ned"], 4)
        for r in records
        if r["kind"] == "eval" and r["step"] >= warmup
    }
    steps = sum(r["kind"] == "train" for r in records)
    own = {"images_seen": images * steps, "points": [list(point) for point in points.items()], "forwards": max(points)}
    return {"run": run.name, "arm": arm, "seed": seed} | found | own


def forwards_to(points: Sequence[Sequence[float]], ned: float) -> float | None:
    """Forwards at the first point that reaches a NED; None if none does."""
    return next((forwards for forwards, value in points if value >= ned), None)


def nft_rows() -> list[Row]:
    rows: list[Row] = json.loads((REPOSITORY / "benchmarks/results/nft.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["kl_weight"] == 0.1]


def others() -> list[Row]:
    """The other algorithms on the same task, with `points` as in `row_of`: from their committed curves."""
    file = REPOSITORY / "benchmarks/results/algorithms.json"
    rows = [
        row
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if row["family"] == "flux_fill" and row["train"] == "full" and row["algorithm"] in ALGORITHMS[1:4]
    ]
    chosen = [({**row, "arm": row["algorithm"].upper()}, row["forwards_per_image"]) for row in rows]
    chosen += [({**row, "arm": "DiffusionNFT, KL .1"}, row["counted"]) for row in nft_rows()]
    return [
        {**row, "points": [[round(each * (images - WARMUP)), ned] for images, ned in row["curve"] if images >= WARMUP]}
        for row, each in chosen
    ]


def table(rows: Sequence[Row]) -> str:
    """One line for each seed of the reward gradient beside NFT's, then the means of the controls, as markdown."""
    lines = ["| run | seed | forwards | NED | glyphs | drift |", "|---" * 6 + "|"]
    for row in (r for r in rows if "nft" in r):
        lines.append(_line("reward gradient", row["seed"], row["forwards"], row["held_out"]["last"]))
        lines.append(_line("DiffusionNFT, KL .1", row["seed"], row["nft"]["forwards"], row["nft"]["held_out"]))
    for arm in dict.fromkeys(r["arm"] for r in rows if "nft" not in r):
        mine = [r for r in rows if r["arm"] == arm]
        means = {measure: fmean(r["held_out"]["last"][measure] for r in mine) for measure in MEASURES}
        lines.append(_line(arm, f"mean of {len(mine)}", mine[0]["forwards"], means))
    return "\n".join(lines)


def _line(name: str, seed: object, forwards: float, measures: Mapping[str, float]) -> str:
    ned, glyphs, drift = (measures[measure] for measure in MEASURES)
    return f"| {name} | {seed} | {forwards:,.0f} | {ned:.3f} | {glyphs:.3f} | {drift:.4f} |"


def reached_table(rows: Sequence[Row]) -> str:
    """Forwards of RL up to the first evaluation with `REACHED`, by seed, as markdown."""
    lines = [f"| algorithm | forwards to NED {REACHED:g}, by seed | an evaluation every |", "|---|---|---|"]
    for arm in dict.fromkeys(r["arm"] for r in rows if "supervised" not in r["arm"]):
        mine = [r for r in rows if r["arm"] == arm]
        found = [forwards_to(r["points"], REACHED) for r in mine]
        shown = ", ".join("not reached" if one is None else f"{one:,.0f}" for one in found)
        every = mine[0]["points"][1][0] - mine[0]["points"][0][0]
        lines.append(f"| {arm} | {shown} | {every:,.0f} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], compared: Sequence[Row], out: Path) -> None:
    """Held-out NED against forwards of RL: a line for each seed."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.4, 4.2))
    shown = [row for row in (*rows, *compared) if "supervised" not in row["arm"]]
    ends = dict[str, tuple[Sequence[float], str]]()
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in shown)):
        own = style(number)
        for row in (row for row in shown if row["arm"] == arm):
            axis.plot(*zip(*row["points"], strict=True), **own, alpha=0.7, linewidth=0.8)
            ends[arm] = max(ends.get(arm, (row["points"][-1],))[0], row["points"][-1]), own["color"]
    axis.axhline(REACHED, color="grey", linewidth=0.6, linestyle=":")
    axis.set_xlim(left=0)
    axis.set_xlabel("network forwards of RL")
    axis.set_ylabel("held-out NED (OCR)")
    label_ends(axis, ends)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
