"""Does classifier-free guidance raise what a tiny base writes? Without that, there is nothing to distil into an
unguided student, and the criterion (a student within .02 of the guided base) holds for one that learned nothing.

Held-out NED on the 192 words that `retouch tiny build` measures a base on, at each guidance scale and number of solver
steps; `over` is the difference to the same base without guidance, paired by word, with its 95 % interval. Both bases
learned with one caption in ten left out. That of Stable Diffusion 1.5 is in the package:

    retouch tiny build sd3 --out runs/text-to-image/sd3
    python benchmarks/guidance.py --out benchmarks/results/guidance.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inputs import digest
from scouts import patched

from algorithms import Row, write
from retouch.families.loading import tiny_path
from retouch.tiny import writing
from retouch.training.evaluation import Evaluation
from retouch.use.comparison import gains

SCALES = (1.0, 1.5, 2.0, 3.0)
STEPS = (4, 8)
"""Solver steps: those of the run files, and those that `retouch tiny build` measures a base with."""

MEASURES = ("ocr.ned", "ocr.exact", "ocr.confidence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=("sd_inpaint", "sd3"), default=["sd_inpaint", "sd3"])
    parser.add_argument("--sd3", type=Path, default=Path("runs/text-to-image/sd3"), help="folder of the base of sd3")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for family in arguments.families:
        folder = arguments.sd3 if family == "sd3" else tiny_path(family)
        for steps in STEPS:
            at = {scale: evaluated(family, folder, scale, steps) for scale in SCALES}
            rows += rows_of(family, folder, steps, at)
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows))


def evaluated(family: str, folder: Path, scale: float, steps: int) -> Evaluation:
    """The evaluation of a base under guidance."""
    found = list[Evaluation]()
    plain = writing.evaluate

    def kept(*arguments: Any) -> Evaluation:
        found.append(plain(*arguments))
        return found[-1]

    guided = {family: replace(writing.SCHEDULES[family], guidance_scale=scale)}
    with patched(writing, "SCHEDULES", guided), patched(writing, "evaluate", kept):
        writing.measure(family, folder, num_steps=steps)
    return found[0]


def rows_of(family: str, folder: Path, steps: int, at: Mapping[float, Evaluation]) -> list[Row]:
    """One row for each guidance scale."""
    [network] = [file for name in ("transformer", "unet") for file in (folder / name).glob("*.safetensors")]
    key = {"family": family, "base": digest(network.read_bytes()), "steps": steps, "images": len(at[1.0].rows)}
    return [
        key
        | {"scale": scale, "forwards_per_image": steps * (2 if scale > 1 else 1)}
        | {"held_out": {name: round(one.means()[name], 4) for name in MEASURES}}
        | {"over": {name: [round(value, 4) for value in gains(one, at[1.0])[name]] for name in MEASURES}}
        for scale, one in at.items()
    ]


def table(rows: list[Row]) -> str:
    """As markdown."""
    lines = ["| base | solver steps | guidance | NED | over guidance 1 | confidence |", "|---" * 6 + "|"]
    for row in rows:
        mean, low, high = row["over"]["ocr.ned"]
        lines.append(
            f"| {row['family']} | {row['steps']} | {row['scale']:g} | {row['held_out']['ocr.ned']:.3f} | "
            f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] | {row['held_out']['ocr.confidence']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
