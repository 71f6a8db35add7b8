"""Kill runs and reward servers at random moments, and compare what they end with with an undisturbed run, bitwise.

Runs: every algorithm on networks of the smallest kind, with a checkpoint after every step. A trial kills one run up to
three times, resumes it each time with resume=auto, lets it finish, and compares weights, EMA weights, snapshots,
optimizer, counters and metrics (without timings) with those of a run that nobody killed:

    SIGKILL             at a random moment from half a second after the start of the process
    SIGKILL, writing    while a checkpoint is written
    SIGTERM, SIGHUP     at a random moment; the run must end with exit code 3, without a traceback
    SLURM               SIGTERM, and SIGKILL after a deadline of up to a second
    server              SIGKILL of a process of the reward server that the run started (GRPO with url: auto); not
                        counted where there is none

Rewards: a server of two instances scores batches while its fronts and workers are killed or frozen (SIGSTOP); every
score is compared with that of the same scorer in this process.

Runs are forks of this process, which has imported the package: a kill costs no ten seconds of imports. The result is
written after every trial, and the same command continues it.

    OMP_NUM_THREADS=1 python benchmarks/kill.py --out benchmarks/results/kill.json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from retouch.families.tiny import tiny_pipeline
from retouch.observe.environment import environment
from retouch.observe.run_dir import read_metrics
from retouch.tiny.edits import write_edits
from retouch.tiny.signs import draw_words, write_signs

SIZE = (32, 32)
PER_TRIAL = 3
WAYS = ["SIGKILL", "SIGKILL, writing", "SIGTERM", "SIGHUP", "SLURM"]
SHARES = [5, 5, 2, 2, 2]
"""Relative frequency of each way."""

STOPPED = 3
ALLOWED = {
    "SIGKILL": {-signal.SIGKILL},
    "SIGKILL, writing": {-signal.SIGKILL},
    "SIGTERM": {STOPPED},
    "SIGHUP": {STOPPED},
    "SLURM": {STOPPED, -signal.SIGKILL},
    "server": {STOPPED},
}
"""Exit codes of a run that was killed before its end."""

LIVES_S = {"front": 6.0, "worker": 2.0}
"""Age in seconds at which a process of the reward server may be killed: one that always ends sooner is given up."""

SCORED_BETWEEN = 100
"""Images that are scored between two kills, at least."""

TARGETS = ("sft", "grpo", "ppo", "dpo", "kto", "nft", "reward_gradient", "vlm_grpo", "grpo_server")


# --- the runs ---


def run_file(target: str, data: Path, runs: Path) -> dict[str, Any]:
    """The run file of a target: four to eight optimizer steps, some within an epoch."""
    run: dict[str, Any] = {
        "name": "t",
        "seed": 5,
        "model": {**model_of("flux_fill", data), "train": {"kind": "lora", "rank": 4}},
        "data": {"format": "self_bench", "path": str(data / "prompts"), "resolution": list(SIZE), "target": "none"},
        "warmup_data": {"format": "self_bench", "path": str(data / "targets"), "resolution": list(SIZE)},
        "rollout": {"group_size": 2, "global_groups_per_batch": 2, "batch_size_per_device": 4, "num_steps": 2},
        "rewards": {"jpeg_size": {}},
        "optimizer": {"lr": 1e-3, "batch_size_per_device": 2, "gradient_accumulation": 1},
        "ema": {"decay": 0.9, "update_interval": 1},
        "training": {
            "max_steps": 6,
            "checkpoint_every": 1,
            "eval_every": 3,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {
            "data": {"format": "self_bench", "path": str(data / "held_out"), "resolution": list(SIZE)},
            "num_examples": 2,
            "grid_examples": 1,
        },
        "logging": {"dir": str(runs), "sinks": []},
        "resume": "auto",
    }
    more: dict[str, dict[str, Any]] = {
        "sft": {"algorithm": {"name": "sft"}, "model": {**run["model"], "train": {"kind": "full"}}},
        "grpo": {"algorithm": {"name": "grpo", "inner_epochs": 2, "kl_weight": 0.1, "sft_steps": 1}},
        "dpo": {"algorithm": {"name": "dpo", "reference_refresh_every": 2, "beta": 100.0}},
        "kto": {
            "algorithm": {"name": "kto", "sft_steps": 1},
            "data": {"format": "manifest", "path": str(data / "labels.json"), "resolution": list(SIZE)},
        },
        "nft": {"algorithm": {"name": "nft", "old_policy": "ramp_half", "kl_weight": 0.1, "inner_epochs": 2}},
        "ppo": {"algorithm": {"name": "ppo"}},
        "reward_gradient": {
            "algorithm": {"name": "reward_gradient", "trained_step": "all", "kl_weight": 0.1},
            "rewards": {"seam": {}},
        },
        "vlm_grpo": {"algorithm": {"name": "vlm_grpo", "trl": VLM_OPTIONS}},
        "grpo_server": {"algorithm": {"name": "grpo"}, "rewards": {"jpeg_size": {"url": "auto"}}},
    }
    run |= more[target]
    if target.startswith(("grpo", "ppo")):
        run["rollout"] |= {"noise_level": 0.7, "window": {"size": 1, "range": [0, 1]}}
    if target == "sft":
        run["data"] = run.pop("warmup_data")
        del run["rewards"]
    if target == "kto":
        run["rollout"], run["rewards"] = {"num_steps": 2}, {}
    if target == "vlm_grpo":
        del run["warmup_data"], run["ema"], run["optimizer"]
        run["model"] = {**model_of("qwen_image_edit", data), "max_sequence_length": 256}
        run["data"] = {"format": "manifest", "path": str(data / "edits" / "manifest.json"), "resolution": 32}
        run["rollout"] = {"num_steps": 1, "guidance_scale": 1.0, "batch_size_per_device": 8}
        run["training"] |= {"gradient_checkpointing": False, "max_steps": 4, "eval_every": 2}
        run["evaluation"] = {"num_examples": 1, "grid_examples": 1}
    if target == "grpo_server":
        run["reward_client"] = {"outage_wait_s": 60}
    return run


def model_of(family: str, data: Path) -> dict[str, Any]:
    """The section of a network as small as the tests use, with random weights."""
    return {"family": family, "path": str(data / family), "dtype": "fp32", "max_sequence_length": 32}


VLM_OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.0,
}


def write_data(folder: Path) -> None:
    """The images that all runs train on, and the models."""
    for family in ("flux_fill", "qwen_image_edit"):
        tiny_pipeline(family, seed=4).save_pretrained(folder / family)
    write_signs(folder / "targets", draw_words(8, "train", 1), SIZE, 1)
    write_signs(folder / "prompts", draw_words(8, "train", 2), SIZE, 2, with_targets=False, first_id=100)
    write_signs(folder / "held_out", draw_words(4, "held_out", 3), SIZE, 3, first_id=200)
    write_edits(folder / "edits", 12, "train", 3)
    signs = sorted((folder / "targets").glob("*_source.png"))
    labelled = [
        {
            "id": number,
            "prompt": f"The text is '{number}'.",
            "image_path": str(sign),
            "mask_path": str(sign).replace("_source", "_mask"),
            "target_path": str(sign),
            "label": "good" if number % 2 else "bad",
        }
        for number, sign in enumerate(signs)
    ]
    (folder / "labels.json").write_text(json.dumps(labelled), encoding="utf-8")


class Process:
    """`retouch train FILE name=NAME` as a fork of this process, the leader of a session of its own."""

    def __init__(self, file: Path, name: str, log: Path) -> None:
        self.log = log
        self.started = time.monotonic()
        self._code: int | None = None
        sys.stdout.flush()
        gc.freeze()  # or the collections of the fork would copy the pages of every module
        self.pid = os.fork()
        if self.pid == 0:
            _become_retouch(["train", str(file), f"name={name}"], log)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it runs for longer."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(0.001)
        return code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become_retouch(arguments: list[str], log: Path) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        with log.open("ab") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        sys.argv = ["retouch", *arguments]
        from retouch.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        log.with_suffix(".modules").write_text("\n".join(sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_as(log: Path) -> None:
    """Import what a finished process had imported, for the forks to come."""
    for name in log.with_suffix(".modules").read_text().split("\n"):
        if name not in sys.modules and not name.startswith(("torch._inductor", "__")):
            with suppress(Exception, SystemExit):
                importlib.import_module(name)


# --- how a run is killed ---


def kill(process: Process, way: str, run: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Kill a run, or meet its end -> {"way", "at_s", "while", "code", "hit"}; `code` is 0 where it had ended before,
    `hit` false where there was no server to kill.

    Args:
        seconds: of an undisturbed run.
    """
    moment = rng.uniform(0.5, max(1.0, seconds))  # before that Python imports, and there is nothing to lose
    deadline = rng.uniform(0.0, 1.0)
    if way == "SIGKILL, writing":
        _wait_for_writing(process, run, rng.randint(1, 4))
        time.sleep(rng.uniform(0, 0.01))
    else:
        process.wait(moment)
    at, where, hit = time.monotonic() - process.started, _state_of(process, run), True
    if way.startswith("SIGKILL"):
        process.send(signal.SIGKILL)
    elif way == "server":
        hit = _kill_server(process, rng)
    else:
        process.send(signal.SIGHUP if way == "SIGHUP" else signal.SIGTERM)
        if way == "SLURM" and process.wait(deadline) is None:
            process.send(signal.SIGKILL)
    code = process.wait(300)
    if code is None:
        process.send(signal.SIGKILL)
        process.wait(10)
        code = 99
    return {"way": way, "at_s": round(at, 3), "while": where, "code": code, "hit": hit}


def _wait_for_writing(process: Process, run: Path, count: int) -> None:
    """Until the COUNTth checkpoint of this process is being written, or its end."""
    seen: set[str] = set()
    while process.poll() is None:
        now = {path.name for path in (run / "checkpoints").glob(".writing-step-*")}
        seen |= now
        if now and len(seen) >= count:
            return
        time.sleep(0.0005)


def _state_of(process: Process, run: Path) -> str:
    """What the process is doing: "starting" until it handles signals, before which there is nothing to lose."""
    if not _catches(process.pid, signal.SIGTERM):
        return "starting"
    if list((run / "checkpoints").glob(".writing-*")):
        return "writing"
    return "training" if (run / "metrics.jsonl").exists() else "loading"


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _kill_server(process: Process, rng: random.Random) -> bool:
    """Kill a process of the run's reward server: supervisor, front or worker -> whether there was one."""
    own = [pid for pid in descendants(process.pid) if b"retouch" in _command(pid)]
    return bool(own) and _kill_pid(rng.choice(own), signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes below one, from /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, edge = list[int](), {pid}
    while edge:
        edge = {child for child, parent in parents.items() if parent in edge}
        found += sorted(edge)
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill_pid(pid: int, number: int) -> bool:
    """Whether it was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


# --- what it ended with ---


def ended_with(run: Path) -> dict[str, Any]:
    """SHA-256 of every file of the last checkpoint but run files and TRL's own state, the counters, and the metrics
    without timings and stops."""
    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = json.loads((folder / "complete.json").read_text())["files"]
    state = json.loads((folder / "state.json").read_text())
    records = [
        {name: value for name, value in record.items() if name != "time"}
        for record in read_metrics(run / "metrics.jsonl")
        if record.get("event") != "stopped"
    ]
    left_out = {"state.json", "trainer_state.json", "training_args.bin"}
    digests = {name: entry["sha256"] for name, entry in files.items() if Path(name).name not in left_out}
    return {"step": folder.name, "files": digests, "progress": state.get("progress"), "metrics": records}


def differences(whole: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Names of what differs."""
    names = sorted({*whole["files"], *again["files"]})
    found = [name for name in names if whole["files"].get(name) != again["files"].get(name)]
    return found + [part for part in ("step", "progress", "metrics") if whole[part] != again[part]]


class Undisturbed:
    """Runs that nobody kills, made on first use."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._made: dict[str, tuple[dict[str, Any], float]] = {}

    def of(self, target: str) -> tuple[dict[str, Any], float]:
        """What it ended with, and its seconds."""
        if target not in self._made:
            file = self.work / f"{target}.yaml"
            file.write_text(yaml.safe_dump(run_file(target, self.work / "data", self.work / "runs" / target)))
            process = Process(file, "whole", self.work / f"{target}.log")
            if process.wait(600) != 0:
                raise SystemExit(f"{target}: the undisturbed run failed; see {process.log}")
            import_as(process.log)
            process = Process(file, "again", self.work / f"{target}.log")
            process.wait(600)
            seconds = time.monotonic() - process.started
            self._made[target] = (ended_with(self.work / "runs" / target / "whole"), seconds)
        return self._made[target]


def trial_of_a_run(number: int, seed: int, undisturbed: Undisturbed) -> dict[str, Any]:
    """Kill one run up to three times, let it finish, compare."""
    rng = random.Random(seed * 100_003 + number)
    target = TARGETS[number % len(TARGETS)]
    whole, seconds = undisturbed.of(target)
    work, name = undisturbed.work, f"trial-{number}"
    run, log = work / "runs" / target / name, work / f"{target}-{name}.log"
    kills: list[dict[str, Any]] = []
    problems: list[str] = []
    for _ in range(PER_TRIAL):
        way = "server" if target == "grpo_server" and rng.random() < 0.7 else rng.choices(WAYS, SHARES)[0]
        one = kill(Process(work / f"{target}.yaml", name, log), way, run, seconds, rng)
        if one["code"] == 0 and way != "server":
            break  # it had ended
        if one.pop("hit"):
            kills.append(one)
        allowed = ALLOWED[way] | ({0} if way == "server" else set())
        if one["while"] == "starting":
            allowed |= {-signal.SIGTERM, -signal.SIGHUP}
        if one["code"] not in allowed:
            problems.append(f"exit code {one['code']} after {way}")
        if one["code"] == 0:
            break
    code = Process(work / f"{target}.yaml", name, log).wait(600)
    if code != 0:
        problems.append(f"exit code {code} after the last resume")
    elif different := differences(whole, ended_with(run)):
        problems.append(f"differs: {', '.join(different)}")
    if "Traceback" in log.read_text(errors="replace"):
        problems.append("a traceback")
    return {"trial": number, "target": target, "kills": kills, "problems": problems}


# --- rewards ---


def trial_of_rewards(seed: int, kills: int, work: Path) -> dict[str, Any]:
    """Score batches on a server of two instances while its processes are killed or frozen.

    Returns:
        {"kills": by kind, "items", "scored", "wrong", "failed": by code}.
    """
    from retouch.rewards.client.client import RewardClient
    from retouch.rewards.protocol import RewardItem
    from retouch.rewards.scorers import make_scorer
    from retouch.types import Score

    rng = random.Random(seed)
    local = make_scorer("jpeg_size", {})
    local.load("cpu")
    endpoints = work / "endpoints.json"
    endpoints.unlink(missing_ok=True)
    command = [sys.executable, "-m", "retouch", "reward", "serve", "jpeg_size", "--port", "0", "--replicas", "2"]
    files = ["--endpoints", str(endpoints), "--log-dir", str(work / "reward-logs")]
    server = subprocess.Popen([*command, *files], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    done, scored = threading.Event(), [0]

    def disturb() -> None:
        seen: dict[int, float] = {}
        while sum(counts.values()) < kills and server.poll() is None:
            enough = scored[0] + SCORED_BETWEEN
            while scored[0] < enough and server.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            now = time.monotonic()
            kinds = {
                pid: "worker" if b"server.process" in _command(pid) else "front" for pid in descendants(server.pid)
            }
            old_enough = [pid for pid, kind in kinds.items() if now - seen.setdefault(pid, now) > LIVES_S[kind]]
            if not old_enough:
                continue
            workers = [pid for pid in old_enough if kinds[pid] == "worker"]
            pid = rng.choice(workers if workers and rng.random() < 0.7 else old_enough)
            kind = kinds[pid]
            frozen = kind == "worker" and rng.random() < 0.2
            if _kill_pid(pid, signal.SIGSTOP if frozen else signal.SIGKILL):
                counts[f"{kind}, {'SIGSTOP' if frozen else 'SIGKILL'}"] += 1
        done.set()

    def noise(i: int) -> RewardItem:
        pixels = np.random.default_rng(i).integers(0, 256, (16 + i % 17, 16 + i % 23, 3), dtype=np.uint8)
        return RewardItem(i, f"item {i}", pixels)

    items = wrong = 0
    try:
        _until(endpoints.exists, 60)
        entries = json.loads(endpoints.read_text())["endpoints"]
        with RewardClient([one["url"] for one in entries], ["jpeg_size"], batch_size=16, timeout_s=60) as client:
            client.wait_ready(60)
            thread = threading.Thread(target=disturb, daemon=True)
            thread.start()
            while not done.is_set():
                batch = [noise(rng.randrange(10_000)) for _ in range(rng.choice([1, 16, 64, 200]))]
                expected = local.score(batch)
                for found, right in zip(client.score(batch)["jpeg_size"], expected, strict=True):
                    items += 1
                    if isinstance(found, Score):
                        scored[0] += 1
                        wrong += found.value != right.value  # type: ignore[union-attr]
                    else:
                        failed[found.code] += 1
            thread.join()
            if server.poll() is not None:
                raise SystemExit(f"the reward server ended with exit code {server.returncode}")
            before = dict(counts)
    finally:
        server.terminate()
        server.wait(60)
    return {"kills": before, "items": items, "scored": scored[0], "wrong": wrong, "failed": dict(failed)}


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("the reward server did not start")
        time.sleep(0.05)


# --- the table ---


def summary(trials: list[dict[str, Any]], rewards: Mapping[str, Any] | None) -> dict[str, Any]:
    """Counts by target, way and state; problems."""
    ways = {
        target: Counter(k["way"] for t in trials if t["target"] == target for k in t["kills"]) for target in TARGETS
    }
    states = Counter(k["while"] for t in trials for k in t["kills"])
    of_servers = sum(of["server"] for of in ways.values()) + (sum(rewards["kills"].values()) if rewards else 0)
    return {
        "kills_of_runs": sum(sum(of.values()) - of["server"] for of in ways.values()),
        "kills_of_servers": of_servers,
        "by_target": {target: dict(sorted(of.items())) for target, of in ways.items()},
        "while": dict(sorted(states.items())),
        "runs": len(trials),
        "runs_that_differ": sum(bool(t["problems"]) for t in trials),
        "problems": [f"trial {t['trial']}, {t['target']}: {p}" for t in trials for p in t["problems"]],
        "rewards": rewards,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120, help="kills of runs, at least")
    parser.add_argument("--reward-kills", type=int, default=40, help="kills of reward processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--out", type=Path, required=True, help="JSON; continued where it exists")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="retouch-kill-") as temporary:
        work = given.work or Path(temporary)
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        if not (work / "data").exists():
            write_data(work / "data")
        before = json.loads(given.out.read_text()) if given.out.exists() else {}
        fits = before.get("seed") == given.seed
        trials: list[dict[str, Any]] = before["trials"] if fits else []
        rewards = before["rewards"] if fits else None
        undisturbed, started = Undisturbed(work), time.monotonic()

        def write() -> None:
            about = {key: environment()[key] for key in ("python", "packages", "platform")}
            seconds = round(time.monotonic() - started + (before.get("seconds", 0) if fits else 0))
            shape = {"seed": given.seed, "arguments": sys.argv[1:]}
            content = {**shape, **summary(trials, rewards), "seconds": seconds, **about, "trials": trials}
            given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

        while sum(len(t["kills"]) for t in trials) < given.kills:
            trials.append(trial_of_a_run(len(trials), given.seed, undisturbed))
            print(json.dumps(trials[-1]), flush=True)
            write()
        if rewards is None and given.reward_kills:
            rewards = trial_of_rewards(given.seed, given.reward_kills, work)
            print(json.dumps(rewards), flush=True)
        write()


if __name__ == "__main__":
    main()
