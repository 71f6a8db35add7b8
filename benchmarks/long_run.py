"""Memory, file handles, threads and step time over a long run and over many reward requests: do they grow?

train: 2,000 steps of DiffusionNFT on a network of the smallest kind with a reward on the CPU, evaluations, checkpoints
and image grids on the way, as `retouch train`. Memory (RSS), handles and threads of the process after every step; the
step time of metrics.jsonl, without evaluations and checkpoints.

rewards: 100,000 images, each another one, scored by `retouch reward serve` over HTTP in requests of 8, by 4 threads of
this process. Memory, handles and threads of client, front and worker after every 500 images, and the time of these.

A slope is that of the least-squares line through 20 means of consecutive samples, the first tenth left out as warm-up,
with its 95 % interval (Student's t, 18 degrees of freedom); `growth` is the slope times the length of the run.

    OMP_NUM_THREADS=1 python benchmarks/long_run.py --out benchmarks/results/long_run.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from kill import SIZE, descendants, model_of, write_data

from retouch.observe.environment import environment
from retouch.observe.run_dir import read_metrics
from retouch.observe.statistics import student

BLOCKS = 20
ITEMS_PER_SAMPLE = 500
REQUEST_ITEMS = 8


def train(steps: int, work: Path) -> dict[str, Any]:
    """Slopes over a run of `steps` optimizer steps."""
    write_data(work / "data")
    run: dict[str, Any] = {
        "name": "long",
        "seed": 5,
        "model": {**model_of("flux_fill", work / "data"), "train": {"kind": "lora", "rank": 4}},
        "data": {
            "format": "self_bench",
            "path": str(work / "data" / "prompts"),
            "resolution": list(SIZE),
            "target": "none",
        },
        "rollout": {"group_size": 2, "global_groups_per_batch": 1, "batch_size_per_device": 2, "num_steps": 1},
        "algorithm": {"name": "nft", "kl_weight": 0.1},
        "rewards": {"jpeg_size": {}},
        "optimizer": {"lr": 1e-5, "batch_size_per_device": 2, "gradient_accumulation": 1},
        "ema": {"decay": 0.9},
        "training": {
            "max_steps": steps,
            "checkpoint_every": max(1, steps // 20),
            "eval_every": max(1, steps // 10),
            "keep_checkpoints": 2,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {
            "data": {"format": "self_bench", "path": str(work / "data" / "held_out"), "resolution": list(SIZE)},
            "num_examples": 2,
            "grid_examples": 1,
        },
        "logging": {"dir": str(work / "runs"), "rollout_images_every": max(1, steps // 20)},
    }
    file = work / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    metrics = work / "runs" / "long" / "metrics.jsonl"
    samples: list[tuple[int, dict[str, float]]] = []
    with (work / "train.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "retouch", "train", str(file)], stdout=log, stderr=log)
        read = step = 0
        while process.poll() is None:
            time.sleep(0.1)
            if metrics.exists() and metrics.stat().st_size > read:
                with metrics.open("rb") as stream:
                    stream.seek(read)
                    lines = stream.read().rpartition(b"\n")[0]
                if not lines:
                    continue
                read += len(lines) + 1
                step = max([step, *(r["step"] for r in map(json.loads, lines.splitlines()) if r["kind"] == "train")])
                samples.append((step, held([process.pid])))
    if process.returncode:
        raise SystemExit(f"the run failed: {(work / 'train.log').read_text()[-2000:]}")
    records = [r for r in read_metrics(metrics) if r["kind"] == "train"]
    seconds = [(r["step"], r["time"]["step"] - r["time"].get("checkpoint", 0.0)) for r in records]
    at = [step for step, _ in samples]
    return {
        "steps": len(records),
        "samples": len(samples),
        **{name: slope(at, [values[name] for _, values in samples]) for name in samples[0][1]},
        "step_s": slope([step for step, _ in seconds], [s for _, s in seconds]),
    }


def rewards(count: int, work: Path) -> dict[str, Any]:
    """Slopes of server and client over `count` scored images."""
    from retouch.process.machine import return_memory
    from retouch.rewards.client.client import RewardClient
    from retouch.rewards.protocol import RewardItem
    from retouch.types import Score

    endpoints = work / "endpoints.json"
    command = [sys.executable, "-m", "retouch", "reward", "serve", "jpeg_size", "--port", "0"]
    files = ["--endpoints", str(endpoints), "--log-dir", str(work / "reward-logs")]
    server = subprocess.Popen([*command, *files], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples, names, failed = list[int](), list[str](), 0
    record = np.ones((count // ITEMS_PER_SAMPLE + 1, 16))  # allocated at once: the client's memory is measured here

    def batch(first: int) -> list[Any]:
        pixels = np.random.default_rng(first).integers(0, 256, (ITEMS_PER_SAMPLE, 16, 16, 3), dtype=np.uint8)
        return [RewardItem(first + i, f"image {first + i}", one) for i, one in enumerate(pixels)]

    try:
        while not endpoints.exists():
            time.sleep(0.1)
        [entry] = json.loads(endpoints.read_text())["endpoints"]
        with (
            RewardClient([entry["url"]], ["jpeg_size"], batch_size=REQUEST_ITEMS, timeout_s=60) as client,
            ThreadPoolExecutor(4) as pool,
        ):
            client.wait_ready(60)
            for first in range(0, count, ITEMS_PER_SAMPLE):
                started, items = time.monotonic(), batch(first)
                quarters = [items[i::4] for i in range(4)]
                for found in pool.map(lambda part: client.score(part)["jpeg_size"], quarters):
                    failed += sum(not isinstance(one, Score) for one in found)
                spent = time.monotonic() - started
                return_memory()  # as a trainer does with every checkpoint
                front, worker = descendants(server.pid)
                sampled = {"client": held([os.getpid()]), "front": held([front]), "worker": held([worker])}
                values = [value for part in sampled.values() for value in part.values()]
                names = [f"{part}_{name}" for part, of in sampled.items() for name in of]
                record[len(samples), : len(values) + 1] = [*values, spent]
                samples.append(first + ITEMS_PER_SAMPLE)
    finally:
        server.terminate()
        server.wait(60)
    columns = record[: len(samples)].T
    slopes = {name: slope(samples, column) for name, column in zip([*names, "time_s"], columns, strict=False)}
    return {"images": samples[-1], "requests": samples[-1] // REQUEST_ITEMS, "failed": failed, **slopes}


def held(pids: Sequence[int]) -> dict[str, float]:
    """Memory in MB, handles and threads of processes together."""
    total = {"rss_mb": 0.0, "handles": 0.0, "threads": 0.0}
    for pid in pids:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            total["handles"] += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        except OSError:
            continue
        if "VmRSS" in status:
            total["rss_mb"] += int(status["VmRSS"].split()[0]) / 1024
            total["threads"] += int(status["Threads"])
    return total


def slope(at: Sequence[float], values: Sequence[float]) -> dict[str, Any]:
    """The line through block means -> {"mean", "per_1000", "interval_per_1000", "growth"} without the first tenth."""
    skipped = len(values) // 10
    x, y = (np.asarray(v[skipped:], float) for v in (at, values))
    blocks = min(BLOCKS, len(x))
    mx, my = (np.array([part.mean() for part in np.array_split(v, blocks)]) for v in (x, y))
    around = mx - mx.mean()
    line = float(around @ (my - my.mean()) / (around @ around))
    residual = my - my.mean() - line * around
    error = float(np.sqrt(residual @ residual / max(1, blocks - 2) / (around @ around)))
    low, high = (1000 * (line + sign * student(BLOCKS - 2) * error) for sign in (-1, 1))
    return {
        "mean": round(float(y.mean()), 4),
        "per_1000": float(f"{1000 * line:.4g}"),
        "interval_per_1000": [float(f"{low:.4g}"), float(f"{high:.4g}")],
        "growth": float(f"{line * (x[-1] - x[0]):.4g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--out", type=Path, required=True, help="JSON; a part that it has is not measured again")
    given = parser.parse_args()
    about = {key: environment()[key] for key in ("python", "packages", "platform")}
    before = json.loads(given.out.read_text()) if given.out.exists() else {}
    content: dict[str, Any] = {**before, **about, "arguments": sys.argv[1:], "load": os.getloadavg()}
    for name, measure in (
        ("rewards", lambda work: rewards(given.images, work)),
        ("train", lambda work: train(given.steps, work)),
    ):
        if name in content:
            continue
        with tempfile.TemporaryDirectory(prefix="retouch-long-") as folder:
            started = time.monotonic()
            content[name] = measure(Path(folder))
            content[name]["seconds"] = round(time.monotonic() - started)
            print(json.dumps(content[name], indent=1), flush=True)
        given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
