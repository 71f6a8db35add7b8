"""The reward server and client, measured: batching, balance, and how much of the rewards' time a run sees.

batching: 64 callers with one picture each, again and again, against our server and against a FastAPI handler that
scores one picture a request (and a LitServe app, where litserve is installed), all with a scorer that costs 20 ms a
call and 1 ms a picture, which is a GPU's shape. Rounds are interleaved; every server is a process of its own.

convnet, ocr: the same with a fixed small convolutional network, and with the ocr reward, both on the CPU and with 8
callers: what this machine does without a GPU.

balance: four servers that answer one at a time, one of them four times slower; the client's two ways to choose.

overlap: steps of a tiny run with 8 groups and a scorer that sleeps for 80 % of the time of the rollout, against the
same run without it.

    python benchmarks/rewards.py --out benchmarks/results/rewards.json
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

CALL_S, ITEM_S = 0.020, 0.001
CALLERS, ROUND_S, ROUNDS = 64, 4.0, 3
PORTS = {"retouch": 18710, "one per request": 18720, "litserve": 18730}


def gpu_like(items: Sequence[Any]) -> list[float]:
    """20 ms a call, 1 ms a picture."""
    time.sleep(CALL_S + ITEM_S * len(items))
    return [float(item.image.mean() / 255) for item in items]


def convnet(items: Sequence[Any]) -> list[float]:
    """Three convolutions of fixed random weights, one forward for all pictures, on one thread of the CPU."""
    import torch

    network = _network()
    pixels = torch.from_numpy(np.stack([item.image for item in items])).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        return network(pixels).flatten().tolist()


@functools.cache
def _network() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, made in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(given, made, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1)).eval()


FUNCTIONS: dict[str, Callable[[Sequence[Any]], list[float]]] = {"gpu_like": gpu_like, "convnet": convnet}
"""Scorers of this file; the others are those of the package."""


# --- the servers that are compared ---


def one_per_request(port: int, reward: str) -> None:
    """The usual handler: one request, one picture, one call; a lock, because scorers are not thread-safe."""
    import uvicorn
    from fastapi import FastAPI, Request

    score, lock = scorer_of(reward), threading.Lock()
    app = FastAPI()

    async def handle(request: Request) -> dict[str, float]:
        body = await request.body()

        def locked() -> float:
            with lock:
                return score([item_of(body)])[0]

        return {"value": await asyncio.to_thread(locked)}

    handle.__annotations__["request"] = Request  # a name of this function, which FastAPI cannot look up
    app.post("/score")(handle)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def scorer_of(reward: str) -> Callable[[Sequence[Any]], list[float]]:
    """A function of this file, or the ocr reward read as one line."""
    if reward in FUNCTIONS:
        return FUNCTIONS[reward]
    from retouch.rewards.protocol import CheckedScorer
    from retouch.rewards.scorers import make_scorer
    from retouch.types import Score

    made = make_scorer("ocr", {"detect": False, "threads": 1})
    made.load("cpu")
    return lambda items: [o.value if isinstance(o, Score) else float("nan") for o in CheckedScorer(made).score(items)]


def item_of(body: bytes) -> Any:
    from retouch.rewards.protocol import RewardItem

    return RewardItem(0, "a sign 'MOKA'", np.frombuffer(body, np.uint8).reshape(SIDE, 2 * SIDE, 3))


SIDE = 64


def picture(reward: str) -> bytes:
    """[64, 128, 3]: noise, or a sign that says MOKA."""
    if reward in FUNCTIONS:
        return np.random.default_rng(0).integers(0, 256, (SIDE, 2 * SIDE, 3), np.uint8).tobytes()
    from retouch.tiny.signs import draw_sign

    return np.asarray(draw_sign("MOKA", (SIDE, 2 * SIDE), 0).picture).tobytes()


# --- load ---


def bodies(name: str, reward: str) -> Callable[[int], tuple[bytes, str]]:
    """Number of a request -> its body and content type, for a kind of server."""
    raw = picture(reward)
    if name == "one per request":
        return lambda n: (raw, "application/octet-stream")
    if name == "litserve":
        import base64

        body = json.dumps({"body": base64.b64encode(raw).decode()}).encode()
        return lambda n: (body, "application/json")

    served = "fn" if reward in FUNCTIONS else "ocr"

    def ours(n: int) -> tuple[bytes, str]:
        manifest = {
            "protocol": 1, "request_id": f"{os.getpid()}-{n}", "deadline_ms": 60000, "rewards": [served],
            "items": [{"id": 0, "prompt": "a sign 'MOKA'", "image": "p"}],
        }  # fmt: skip
        parts = [("manifest", "application/json", json.dumps(manifest).encode())]
        parts.append(("p", f"image/x-raw; height={SIDE}; width={2 * SIDE}; channels=3", raw))
        body = b"".join(
            f'--b\r\nContent-Disposition: form-data; name="{part}"\r\nContent-Type: {kind}\r\n\r\n'.encode()
            + content
            + b"\r\n"
            for part, kind, content in parts
        )
        return body + b"--b--\r\n", "multipart/form-data; boundary=b"

    return ours


def request(path: str, port: int, kind: str, body: bytes) -> bytes:
    """A request to a server of this machine, by the name that it answers to without a token."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def load(name: str, reward: str, callers: int, seconds: float, counter: list[int]) -> list[float]:
    """Latencies of every request that `callers` made in `seconds`, over plain sockets that stay open."""
    make, path = bodies(name, reward), "/predict" if name == "litserve" else "/score"
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORTS[name])
        while True:  # one at least, however busy the machine is
            counter[0] += 1
            body, kind = make(counter[0])
            started = time.perf_counter()
            writer.write(request(path, PORTS[name], kind, body))
            reply = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in reply.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            answer = json.loads(await reader.readexactly(length))
            assert b" 200 " in reply.split(b"\r\n", 1)[0], answer
            assert "value" in answer or answer["items"][0]["scores"], answer
            latencies.append(time.perf_counter() - started)
            if time.perf_counter() >= end:
                break
        writer.close()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return latencies


def batching(reward: str, callers: int, with_litserve: bool) -> list[dict[str, Any]]:
    """Requests a second and latencies of every kind of server, rounds interleaved."""
    names = ["retouch", "one per request", *(["litserve"] if with_litserve else [])]
    context = multiprocessing.get_context("spawn")
    ocr: dict[str, Any] = {"detect": False, "threads": 1}
    options = {"fn": {"fn": f"rewards:{reward}"}} if reward in FUNCTIONS else {"ocr": ocr}
    command = [sys.executable, "-m", "retouch", "reward", "serve", next(iter(options)), "--port", str(PORTS["retouch"])]
    here = Path(__file__).resolve().parent
    written = Path(tempfile.mkdtemp())
    command += ["--endpoints", str(written / "endpoints.json"), "--log-dir", str(written)]
    ours = subprocess.Popen([*command, "--options", json.dumps(options)], cwd=here, stderr=subprocess.DEVNULL)
    usual = context.Process(target=one_per_request, args=(PORTS["one per request"], reward), daemon=True)
    usual.start()
    litserve: subprocess.Popen[bytes] | None = None
    if with_litserve:
        app = [sys.executable, str(here / "litserve_app.py"), str(PORTS["litserve"]), reward]
        quiet = subprocess.DEVNULL
        litserve = subprocess.Popen(app, start_new_session=True, stdout=quiet, stderr=quiet)
    seen: dict[str, list[float]] = {name: [] for name in names}
    counter = [0]
    try:
        for name in names:
            wait_for(lambda name=name: asyncio.run(load(name, reward, 1, 0.5, counter)))
        for _ in range(ROUNDS):
            for name in names:
                seen[name] += asyncio.run(load(name, reward, callers, ROUND_S, counter))
    finally:
        ours.terminate()
        ours.wait()
        usual.terminate()
        if litserve is not None:
            os.killpg(litserve.pid, signal.SIGKILL)  # its own processes outlive it
            litserve.wait()
    return [
        {
            "server": name, "scorer": reward, "callers": callers, "requests_per_s": len(found) / (ROUNDS * ROUND_S),
            "latency_p50_s": float(np.percentile(found, 50)), "latency_p95_s": float(np.percentile(found, 95)),
        }
        for name, found in seen.items()
    ]  # fmt: skip


def wait_for(ready: Callable[[], Any], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            ready()
        except Exception:  # not there yet, in whatever way
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            return


# --- balance ---


class SerialServer:
    """Answers one request at a time, each after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.answered = 0
        self._one = asyncio.Lock()

    async def start(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(length)
                async with self._one:
                    await asyncio.sleep(self.seconds)
                self.answered += 1
                items = [{"id": 0, "scores": {"r": {"value": 0.5}}}]
                body = json.dumps({"items": items, "scorers": {"r": {"revision": "1"}}}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def balance(requests: int = 88, seconds: float = 0.1) -> list[dict[str, Any]]:
    """Makespan of `requests` over four servers, one of them four times slower than `seconds`."""
    from retouch.rewards.client.client import RewardClient
    from retouch.rewards.client.config import RewardClientConfig
    from retouch.rewards.protocol import RewardItem

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    items = [RewardItem(i, "p", np.zeros((8, 8, 3), np.uint8)) for i in range(requests)]
    rows: list[dict[str, Any]] = []
    costs = [seconds] * 3 + [4 * seconds]
    ideal = requests / sum(1 / cost for cost in costs)
    for way, most in (("least_outstanding", 4), ("round_robin", 4), ("round_robin", requests)):
        servers = [SerialServer(cost) for cost in costs]
        urls = [asyncio.run_coroutine_threadsafe(server.start(), loop).result() for server in servers]
        options = RewardClientConfig(batch_size=1, balance=way, requests_per_server=most)  # pyright: ignore[reportArgumentType]
        with RewardClient(urls, ["r"], options=options) as client:
            started = time.perf_counter()
            client.score(items)
            took = time.perf_counter() - started
        rows.append({
            "balance": way, "requests_per_server": most, "makespan_s": took, "ideal_s": ideal,
            "of_ideal": took / ideal, "answered": [server.answered for server in servers],
        })  # fmt: skip
    return rows


# --- overlap ---


def sleeper(items: Sequence[Any]) -> list[float]:
    """As long a picture as OVERLAP_S says."""
    time.sleep(float(os.environ["OVERLAP_S"]) * len(items))
    return [float(item.image.mean() / 255) for item in items]


def overlap(steps: int = 8) -> dict[str, Any]:
    """Seconds of a step with a reward that sleeps for 80 % of the rollout's time, and of the same run without it."""
    import torch

    from retouch.tiny.signs import (
        draw_words,
        write_signs,
    )

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_signs(root / "data", draw_words(8, "train", 1), (32, 64), 1)
        os.environ["OVERLAP_S"] = "0"
        quiet = run_of(root, "quiet", steps)
        per_image = 0.8 * quiet["rollout_s"] / 64
        os.environ["OVERLAP_S"] = str(per_image)
        slow = run_of(root, "slow", steps)
    reward = 64 * per_image
    work = slow["rollout_s"] + slow["training_s"]
    bound = max(work, reward)
    return {
        "groups": 8, "images": 64, "steps": steps, "reward_s": reward, **{f"without_{k}": v for k, v in quiet.items()},
        **slow, "of_bound": slow["step_s"] / bound,
    }  # fmt: skip


def run_of(root: Path, name: str, steps: int) -> dict[str, float]:
    """Train, and average the seconds of steps (the first left out)."""
    from retouch.algorithms.train import recipe
    from retouch.config import parse_run
    from retouch.observe.run_dir import read_metrics
    from retouch.training.build import build

    config = parse_run({
        "name": name,
        "model": {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "max_sequence_length": 24,
                  "train": {"kind": "full"}},
        "data": {"format": "self_bench", "path": str(root / "data"), "resolution": [32, 64]},
        "rollout": {"group_size": 8, "global_groups_per_batch": 8, "batch_size_per_device": 4, "num_steps": 4},
        "algorithm": {"name": "grpo", "clip_range": 1e-3},
        "rewards": {"fn": {"fn": "rewards:sleeper", "url": "auto"}},
        "optimizer": {"batch_size_per_device": 16, "gradient_accumulation": 4},
        "training": {"max_steps": steps, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no",
                     "gradient_checkpointing": False},
        "evaluation": {"num_examples": 1, "grid_examples": 0},
        "logging": {"dir": str(root / "runs"), "sinks": []},
    })  # fmt: skip
    run = build(config)
    try:
        recipe("grpo")(run)
    finally:
        run.close()
    records = [r for r in read_metrics(run.dir.path / "metrics.jsonl") if r["kind"] == "train"][1:]
    seconds = {key: fmean(part_s(r, key) for r in records) for key in ("rollout", "vae", "text", "reward_wait")}
    training = fmean(sum(part_s(r, key) for key in ("train_forward", "train_backward", "optimizer")) for r in records)
    rollout = seconds["rollout"] + seconds["vae"] + seconds["text"]
    wait = seconds["reward_wait"]
    return {"step_s": rollout + training + wait, "rollout_s": rollout, "training_s": training, "reward_wait_s": wait}


def part_s(record: dict[str, Any], name: str) -> float:
    """Seconds of a part of a step, as the run logged them."""
    return float(record["time"][name])


def table(found: Mapping[str, Any]) -> str:
    """One line for each scorer and server, as markdown."""
    lines = ["| scorer | server | callers | requests/s | p50 s | p95 s |", "|---|---|---|---|---|---|"]
    for part in ("batching", "convnet", "ocr"):
        for row in found[part]["found"]:
            speed, median, late = (row[k] for k in ("requests_per_s", "latency_p50_s", "latency_p95_s"))
            lines.append(f"| {part} | {row['server']} | {row['callers']} | {speed:.0f} | {median:.3f} | {late:.3f} |")
    return "\n".join(lines)


def balance_table(found: Mapping[str, Any]) -> str:
    """One line for each way to balance, as markdown."""
    lines = ["| balance | requests_per_server | of ideal |", "|---|---|---|"]
    lines += [
        f"| {r['balance']} | {r['requests_per_server']} | {r['of_ideal']:.2f} |" for r in found["balance"]["found"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["batching", "convnet", "ocr", "balance", "overlap"])
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, here)
    found: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    with_litserve = has_module("litserve") and has_module("zmq")
    if not with_litserve:
        print("LitServe is not compared: pip install litserve pyzmq", file=sys.stderr)
    measures: dict[str, Callable[[], Any]] = {
        "batching": lambda: batching("gpu_like", CALLERS, with_litserve),
        "convnet": lambda: batching("convnet", 8, with_litserve),
        "ocr": lambda: batching("ocr", 8, with_litserve),
        "balance": balance,
        "overlap": overlap,
    }
    for part in arguments.parts:
        before = os.getloadavg()[0]
        found[part] = {"load_average_before": before, "niceness": os.nice(0), "found": measures[part]()}
        print(part, json.dumps(found[part], indent=1), flush=True)
        found["machine"] = {"cpus": os.cpu_count(), "system": platform.platform()}
        if arguments.out:
            arguments.out.write_text(json.dumps(found, indent=2) + "\n")


def has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    main()
