"""Size and load time of `retouch report` for runs of 80, 1,000 and 10,000 steps, in a headless Chromium.

    python benchmarks/report_pages.py            writes benchmarks/results/report_pages.json

The runs are made up: curves with noise, and images of words that become sharper. Only the pages are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from retouch.config import dump_run, load_run
from retouch.observe.report import write_report

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = ROOT / "configs/tiny/flux_fill_grpo.yaml"
WORDS = ("SALE", "OPEN", "CAFE", "EXIT", "TAXI", "BAKERY", "HOTEL", "MUSEUM", "PIZZA", "LIBRARY", "FLOWERS", "BOOKS")

CASES = {"80": (80, 5, 12), "1000": (1000, 20, 12), "10000": (10_000, 100, 50)}
"""Name -> optimizer steps, evaluations and images of each."""


def write_run(
    run: Path, steps: int, evaluations: int = 5, images: int = 12, *, seed: int = 0, of: int | None = None, **keys: Any
) -> Path:
    """Write the directory of a made-up run, without checkpoints -> its path.

    Args:
        steps: optimizer steps that it has taken.
        of: `training.max_steps`; those that it has taken if not given.
        keys: values of the run file, with __ for dots.
    """
    run.mkdir(parents=True)
    last = of or steps
    every = max(1, last // max(1, evaluations - 1))
    given = {"training.max_steps": last, "training.eval_every": every, "algorithm.sft_steps": 0, "seed": seed}
    given |= {"name": run.name, "logging.dir": str(run.parent), "training.stop_on_plateau": "false"}
    given |= {name.replace("__", "."): value for name, value in keys.items()}
    (run / "config.yaml").write_text(dump_run(load_run(RUN_FILE, [f"{k}={v}" for k, v in given.items()])))
    slope = float(keys.get("optimizer__lr", 1e-3)) / 1e-3
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for record in _records(run, steps, last, every, images, seed, slope):
            metrics.write(json.dumps(record) + "\n")
    return run


def _records(
    run: Path, steps: int, last: int, every: int, images: int, seed: int, slope: float
) -> Iterator[dict[str, Any]]:
    noise = random.Random(seed)
    start = {"step": 0, "kind": "eval", "moment": "start", "examples": "held_out", "images": images}
    yield start | _evaluation(run, 0, images, 0.0, seed)
    for step in range(1, steps + 1):
        gained = float(1 - np.exp(-3.5 * slope * step / last))
        reward = 0.25 + 0.6 * gained + noise.gauss(0, 0.03)
        timing = {"step": 2.0, "rollout": 1.1, "reward": 0.2, "train": 0.7, "nfe_rollout": 96.0, "images": 16.0}
        if step % 2 == 1:
            yield {"step": step, "kind": "rollout", "epoch": step // 2, "images": 16, "failed": 0.0} | {
                "reward/ocr": reward,
                "combined_score": reward,
                "combined_std": 0.1 + noise.random() / 40,
                "zero_std_groups": 0.1 * gained,
            }
        yield {"step": step, "kind": "train", "phase": "rl", "epoch": step // 2, "lr": 1e-3} | {
            "loss": noise.gauss(0, 1e-3),
            "ratio": 1 + noise.gauss(0, 1e-4),
            "max_abs_log_ratio": 0.0 if step % 2 else abs(noise.gauss(0.004, 0.001)),
            "clip_fraction": max(0.0, noise.gauss(0.1, 0.03)),
            "approx_kl": abs(noise.gauss(1e-5, 3e-6)),
            "kl": 0.004 * gained + noise.gauss(0, 1e-4),
            "grad_norm": 0.02 * float(np.exp(noise.gauss(0, 0.5))),
            "time": timing,
        }
        if step % every == 0 or step == last:
            record = {"step": step, "kind": "eval", "moment": "end" if step == last else "step"}
            found = _evaluation(run, step, images, gained, seed)
            yield record | {"examples": "held_out", "images": images, "time": {"step": 6.0, "eval": 6.0}} | found
    if steps == last:
        yield {"step": steps, "kind": "event", "event": "finished"}


def _evaluation(run: Path, step: int, images: int, gained: float, seed: int) -> dict[str, float]:
    """Write the files of an evaluation -> its means."""
    folder = run / "evaluations" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    noise = random.Random(1000 * seed + step)
    rows: list[dict[str, Any]] = []
    for i in range(images):
        text = WORDS[i % len(WORDS)]
        ned = float(min(1.0, max(0.0, 0.2 + 0.7 * gained + 0.15 * np.sin(i) + noise.gauss(0, 0.05))))
        read = "".join(c if noise.random() < ned else noise.choice("OIXTEH") for c in text)
        rows.append({"example": i, "index": 0, "text": text, "read": read, "ocr": ned, "ocr.ned": ned})
        rows[-1] |= {"ocr.exact": float(read == text), "outside_l1": 0.02 + 0.01 * noise.random()}
        _sign(text, ned, i).save(folder / f"{i:05d}.png")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def _sign(text: str, sharp: float, seed: int) -> Image.Image:
    hue = (seed * 47) % 255
    sign = Image.new("HSV", (64, 32), (hue, 90, 200)).convert("RGB")
    ImageDraw.Draw(sign).text((32, 16), text, "black", ImageFont.load_default(size=16), anchor="mm")
    return sign.filter(ImageFilter.GaussianBlur(4 * (1 - float(sharp))))


def measure(browser: Any, page: Path) -> dict[str, float]:
    """Bytes of a page, and milliseconds until it has drawn its curves and images."""
    tab = browser.page()
    try:
        started = time.perf_counter()
        tab.open(page)
        tab.wait("document.documentElement.dataset.ready && !!document.querySelector('canvas')")
        tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return {"kilobytes": round(page.stat().st_size / 1e3), "load_ms": round(1e3 * (time.perf_counter() - started))}
    finally:
        tab.close()


def main() -> None:
    from tests.browser import Browser, executable

    argparse.ArgumentParser(description=__doc__).parse_args()
    program = executable()
    assert program, "no Chromium"
    browser = Browser(program)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_result(browser, Path(folder))
    finally:
        browser.close()


def write_result(browser: Any, folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    for name, (steps, evaluations, images) in CASES.items():
        run = write_run(folder / f"run-{name}", steps, evaluations, images)
        started = time.perf_counter()
        page = write_report(run)
        row = {"steps": steps, "images": len(list(run.glob("evaluations/*/*.png")))}
        row |= {"write_ms": round(1e3 * (time.perf_counter() - started))}
        loads = [measure(browser, page) for _ in range(3)]
        rows.append(row | {"kilobytes": loads[0]["kilobytes"], "load_ms": sorted(one["load_ms"] for one in loads)[1]})
    machine = {"cores": os.cpu_count(), "platform": platform.machine(), "browser": "Chromium, headless"}
    result = {"what": "retouch report of made-up runs, median of 3 loads", "machine": machine, "rows": rows}
    (ROOT / "benchmarks/results/report_pages.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/report.md."""
    lines = [
        f"| {row['steps']:,} | {row['images']:,} | {row['kilobytes'] / 1e3:.1f} | {row['write_ms'] / 1e3:.1f} | "
        f"{row['load_ms'] / 1e3:.1f} |"
        for row in rows
    ]
    return "\n".join(
        ["| optimizer steps | stored images | page, MB | written in, s | open in, s |", "|---|---|---|---|---|", *lines]
    )


if __name__ == "__main__":
    main()
