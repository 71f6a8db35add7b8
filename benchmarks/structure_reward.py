"""Does a structure reward beside OCR make letters more whole? The tiny SD1.5 base trained with OCR alone, and with OCR
and glyph_structure: the same steps, seeds, data and held-out words. Online DPO adds the value of glyph_structure to
that of OCR; DiffusionNFT trains on its gradient by the pixels (`gradient_weight`), of the robust network and of the
standard one, and with OCR alone for twice the steps too.

The measure is glyph correlation: the ink of the sample against renderings of the word. No reward is computed from it.
Runs of online DPO with OCR alone are those of benchmarks/algorithms.py (give the same --work and they are not made
again).

    python benchmarks/structure_reward.py --out benchmarks/results/structure_reward.json
    python benchmarks/structure_reward.py --trial --work runs/structure --out benchmarks/results/structure_trial.json

`--trial` is one seed of reward gradients: the recogniser alone, and with glyph_structure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from inputs import digest, inputs

from algorithms import REPOSITORY, Row, evaluations, make_data, measured, retouch, write
from retouch.config import derive, load_run
from retouch.observe.report import change_of
from retouch.training.evaluation import Evaluation, load_evaluation
from retouch.use.comparison import gains
from retouch_glyphs.glyph_structure import FOLDERS, WEIGHTS
from retouch_glyphs.scorers.glyph_structure import GlyphStructureReward

CONFIGS = REPOSITORY / "configs/tiny"


class Arm(NamedTuple):
    """The first part of the names of its runs, and how they are trained."""

    prefix: str
    file: Path
    overrides: tuple[str, ...] = ()


NFT, NFT_STRUCTURE = CONFIGS / "sd_inpaint_nft.yaml", CONFIGS / "sd_inpaint_nft_structure.yaml"
STANDARD, LONGER = ("rewards.glyph_structure.network=standard",), ("training.max_steps=160",)
ARMS = {
    "dpo": {
        "ocr": Arm("sd_inpaint-dpo-full", CONFIGS / "sd_inpaint_dpo.yaml"),
        "ocr + glyph_structure": Arm("sd_inpaint-dpo-structure", CONFIGS / "sd_inpaint_dpo_structure.yaml"),
    },
    "nft": {
        "ocr": Arm("sd_inpaint-nft-ocr", NFT),
        "ocr, twice the steps": Arm("sd_inpaint-nft-longer", NFT, LONGER),
        "ocr + glyph_structure, standard": Arm("sd_inpaint-nft-standard", NFT_STRUCTURE, STANDARD),
        "ocr + glyph_structure, robust": Arm("sd_inpaint-nft-structure", NFT_STRUCTURE),
    },
}
"""Algorithm -> its arms; each is compared with those before it."""

TRIAL_FILE = CONFIGS / "sd_inpaint_reward_gradient.yaml"
TRIAL_STEPS = (30, 48)
TRIAL_SHARED = ("seed=0",)
TRIAL = {
    "recognizer": ("rewards.glyph_structure={role: gold, boxes: fitted}",),
    "recognizer + glyph_structure": ("rewards.glyph_structure={weight: 4, boxes: fitted}",),
}
"""Arm -> overrides of `TRIAL_FILE`. At the start the gradient of the recogniser is several times larger."""

COMPARED = ("ocr.ned", "glyph_correlation", "outside_l1")
TRIAL_COMPARED = ("ocr.ned", "glyph_correlation", "glyph_structure", "outside_l1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--trial", action="store_true", help="reward gradients instead of --algorithms")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of every arm, for a trial")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    data = arguments.work / "data"
    make_data(data)
    if arguments.trial:
        rows = trial(train_trial(data, arguments.work))
        if arguments.out:
            write(rows, arguments.out)
        print(trial_table(rows))
        return
    for algorithm, seed in product(arguments.algorithms, arguments.seeds):
        for arm in ARMS[algorithm]:
            row = trained(algorithm, arm, seed, data, arguments.work, arguments.set)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
        by_arm = {r["arm"]: r for r in rows if (r["algorithm"], r["seed"]) == (algorithm, seed)}
        compare([by_arm[arm] for arm in ARMS[algorithm]], arguments.work)
        if arguments.out:
            write(sorted(rows, key=lambda r: r["run"]), arguments.out)
    print(table(rows))


def trained(algorithm: str, arm: str, seed: int, data: Path, work: Path, overrides: Sequence[str]) -> Row:
    """Train one arm and measure it."""
    prefix, file, own = ARMS[algorithm][arm]
    name, overrides = f"{prefix}-{seed}", [*own, *overrides]
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "training.eval_every=20", "resume=auto"]
    retouch("train", str(file), *options, *overrides, DATA_PATH=str(data))
    key = {"run": name, "algorithm": algorithm, "arm": arm, "seed": seed, "inputs": read_by(file, overrides)}
    return key | measured(work / name, derive(load_run(file, overrides)).forwards_per_image)


def read_by(file: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Digests of what a run reads."""
    return {**inputs(file, overrides=overrides), **network_of(file, overrides)}


def network_of(file: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Digest of the network of a run's glyph_structure; empty without one."""
    for reward in load_run(file, list(overrides)).rewards.values():
        if isinstance(reward, GlyphStructureReward):
            return {"glyph_structure": digest((FOLDERS[reward.network] / WEIGHTS).read_bytes())}
    return {}


def compare(rows: Sequence[Row], work: Path) -> None:
    """Add to each row its paired differences to each row before it, on the same held-out words and noise."""
    last = {row["run"]: evaluations(work / row["run"])["last"] for row in rows}
    for before, after in combinations(rows, 2):
        ends = last[after["run"]], last[before["run"]]
        found = gains(*ends)
        changes = {measure: [round(v, 4) for v in found[measure]] for measure in COMPARED}
        after.setdefault("against", {})[before["arm"]] = changes | {"equally read": equally_read(*ends)}


def equally_read(after: Evaluation, before: Evaluation) -> dict[str, Any] | None:
    """Paired difference in glyph correlation over the words whose NED is the same in both; None for fewer than two."""
    ned = {(row["example"], row["index"]): row.get("ocr.ned") for row in before.rows}
    rows = [row for row in after.rows if row.get("ocr.ned") is not None]
    rows = [row for row in rows if row["ocr.ned"] == ned.get((row["example"], row["index"]))]
    change = change_of(before.rows, rows, "glyph_correlation")
    return change and {"words": len(rows), "glyph_correlation": [round(v, 4) for v in change]}


def train_trial(data: Path, work: Path) -> list[Path]:
    """Train both arms of the trial; their run directories."""
    runs = [work / f"sd_inpaint-trial-{number}" for number in range(len(TRIAL))]
    for run, overrides in zip(runs, TRIAL.values(), strict=True):
        options = [f"name={run.name}", f"logging.dir={work}", "resume=auto", *TRIAL_SHARED, *overrides]
        retouch("train", str(TRIAL_FILE), *options, DATA_PATH=str(data))
    return runs


def trial(runs: Sequence[Path]) -> list[Row]:
    """A row for each arm of the trial: its held-out means after some steps, and the paired differences to the first."""
    read = {**inputs(TRIAL_FILE), **network_of(TRIAL_FILE, TRIAL["recognizer + glyph_structure"])}
    points = [[load_evaluation(run / f"evaluations/step-{step:06d}") for step in TRIAL_STEPS] for run in runs]
    rows: list[Row] = []
    for (arm, overrides), own in zip(TRIAL.items(), points, strict=True):
        means = [{m: round(e.means()[m], 4) for m in TRIAL_COMPARED} for e in own]
        found = [gains(e, alone) for e, alone in zip(own, points[0], strict=True)]
        against = [{m: [round(v, 4) for v in f[m]] for m in TRIAL_COMPARED} for f in found]
        key = {"arm": arm, "seed": 0, "overrides": [*TRIAL_SHARED, *overrides], "inputs": read}
        rows.append(key | {"images": len(own[0].rows), "steps": TRIAL_STEPS, "held_out": means, "against": against})
    return rows


def trial_table(rows: Sequence[Row]) -> str:
    """One line for each step of the trial, as markdown."""
    lines = ["| step | NED | glyph correlation | glyph_structure | difference in NED | in glyph correlation |"]
    lines.append("|---" * 6 + "|")
    alone, both = rows
    for i, step in enumerate(both["steps"]):
        arrows = [f"{alone['held_out'][i][m]:.3f} → {both['held_out'][i][m]:.3f}" for m in TRIAL_COMPARED[:3]]
        changes = [interval(both["against"][i][m]) for m in TRIAL_COMPARED[:2]]
        lines.append(f"| {step} | {' | '.join([*arrows, *changes])} |")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """One line per run with a second reward or more steps, against OCR alone, as markdown."""
    measures = ("ocr.ned", "glyph_correlation")
    head = ["algorithm", "trained with", "seed", "NED", "glyph correlation", "difference in NED"]
    lines = [f"| {' | '.join([*head, 'in glyph correlation', 'at equal NED'])} |", "|---" * 8 + "|"]
    for algorithm, arms in ARMS.items():
        first, *others = arms
        own = {(r["arm"], r["seed"]): r for r in rows if r["algorithm"] == algorithm}
        for arm, seed in product(others, sorted({seed for _, seed in own})):
            if not {(first, seed), (arm, seed)} <= own.keys():
                continue
            alone, row = own[first, seed], own[arm, seed]
            against = row["against"][first]
            ends = [f"{alone['held_out']['last'][m]:.3f} → {row['held_out']['last'][m]:.3f}" for m in measures]
            shown = [algorithm, arm, str(seed), *ends, *(interval(against[m]) for m in measures)]
            alike = against.get("equally read")
            shown.append(f"{interval(alike['glyph_correlation'])} ({alike['words']})" if alike else "–")
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def interval(change: Sequence[float]) -> str:
    """A difference with its interval."""
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*change)


if __name__ == "__main__":
    main()
