"""Host memory of each process while a network is loaded that is trained whole: bf16 files, fp32 weights.

`whole` reads the network as fp32 on every process, as retouch did until November 2026; `mapped` leaves it in its files
until a process takes its part. Counted is memory that the kernel cannot drop (`Anonymous` of /proc/self/smaps_rollup):
pages of the files are shared by all processes and can be read again; `pss` counts them with each process's share.
A process has its peak above its size after the imports, when the processes have found each other.

    python benchmarks/loading_memory.py --out benchmarks/results/loading_memory.json
    python benchmarks/loading_memory.py --cases mapped-small-2-fsdp2
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from loop_overhead import machine
from safetensors.torch import save_file

from retouch.config.run import OptimizerConfig, TrainingConfig
from retouch.engine import Engine
from retouch.engine.sharding import blocks, piece
from retouch.families.loading import family_class
from retouch.families.meta import on_meta

LAYERS = {"small": (1, 1), "large": (3, 7)}
"""Double and single blocks of FLUX.1's width: .6 and 2.1 billion weights."""

CASES = (
    *(f"{way}-small-{n}-{'fsdp2' if n > 1 else 'none'}" for way in ("whole", "mapped") for n in (1, 2, 4)),
    *(f"mapped-large-{n}-fsdp2" for n in (2, 4)),
    "mapped-small-2-zero3",  # needs DeepSpeed
)
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="whole|mapped-small|large-PROCESSES-SHARDING")
    parser.add_argument("--work", type=Path, help="folder for the networks, which are deleted at the end")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--child", nargs=4, metavar=("WAY", "FOLDER", "SHARDING", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        for case in arguments.cases:
            rows.append(measured(case, Path(work)))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.out:  # after each case: a later one may not fit
                result = {"machine": machine(), "rows": rows}
                arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measured(case: str, work: Path) -> dict[str, Any]:
    """A row: the processes' largest numbers, in GB of 10^9 bytes."""
    way, size, processes, sharding = case.split("-")
    folder, out = work / size, work / case
    if not folder.is_dir():
        for other in work.iterdir():
            shutil.rmtree(other)
        write_network(folder, *LAYERS[size])
    out.mkdir()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes)
    command = [sys.executable, *(launcher if processes != "1" else ()), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*command, "--child", way, str(folder), sharding, str(out)], env=environment, check=True)
    found = [json.loads(file.read_text(encoding="utf-8")) for file in out.iterdir()]
    largest = {name: max(one[name] for one in found) for name in found[0]}
    bound = round(largest["share_gb"] + largest["block_gb"] + 0.5, 3)
    return {
        "case": case,
        "processes": int(processes),
        **largest,
        "bound_gb": bound,
        "fits": largest["peak_gb"] <= bound,
    }


def write_network(folder: Path, double: int, single: int) -> None:
    """A model folder with the network alone, in bf16 and several files."""
    network: Any = on_meta(lambda: FluxTransformer2DModel(num_layers=double, num_single_layers=single))
    target = folder / "transformer"
    target.mkdir(parents=True)
    (target / "config.json").write_text(network.to_json_string(), encoding="utf-8")
    some = (torch.arange(2**20, dtype=torch.int32) % 251).bfloat16() / 2**14
    names: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    for name, weight in network.state_dict().items():
        part[name] = some.repeat(-(-weight.numel() // len(some)))[: weight.numel()].view(weight.shape).clone()
        if sum(tensor.nbytes for tensor in part.values()) > 2**29:
            _write(part, target, names)
    _write(part, target, names)
    index = {"metadata": {"total_size": sum(2 * w.numel() for w in network.parameters())}, "weight_map": names}
    (target / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write(part: dict[str, torch.Tensor], target: Path, names: dict[str, str]) -> None:
    if part:
        file = f"diffusion_pytorch_model-{len(set(names.values())) + 1:05d}-of-00099.safetensors"
        save_file(part, target / file, {"format": "pt"})
        names.update(dict.fromkeys(part, file))
        part.clear()


def child(way: str, folder: str, sharding: str, out: str) -> None:
    """One process: load, place, tell."""
    torch.set_num_threads(1)
    training = TrainingConfig(mixed_precision="bf16", sharding=sharding)  # type: ignore[arg-type]
    engine = Engine(training, OptimizerConfig(lr=1e-5), seed=0)
    kind = family_class("flux_dev")
    config = kind.section.model_validate({"path": folder, "train": {"kind": "full"}})
    engine.barrier()
    gc.collect()
    with Peak() as peak:
        load = kind.load_network if way == "whole" else kind.mapped_network
        network = load(config, folder, torch.float32).requires_grad_(True)
        largest = max(sum(p.numel() * 4 for p in block.parameters()) for block in blocks(network))
        engine.prepare(network, gradient_checkpointing=False, dtype=torch.float32)
        engine.barrier()
    share = sum(piece(p).nbytes for p in network.parameters())
    told = {"share_gb": share, "block_gb": largest, "peak_gb": peak.most["Anonymous"], "peak_pss_gb": peak.most["Pss"]}
    told["held_gb"] = memory()["Anonymous"] - peak.before["Anonymous"]
    (Path(out) / f"{engine.rank}.json").write_text(json.dumps({n: round(v / GB, 3) for n, v in told.items()}))
    engine.barrier()
    if engine.world_size > 1:
        torch.distributed.destroy_process_group()


class Peak:
    """The most memory while the block ran, above that at its start."""

    def __enter__(self) -> Peak:
        self.before = memory()
        self.most = dict.fromkeys(self.before, 0)
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._run)
        self._watch.start()
        return self

    def _run(self) -> None:
        while True:
            last = self._done.wait(0.01)
            for name, value in memory().items():
                self.most[name] = max(self.most[name], value - self.before[name])
            if last:
                return

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()


def memory() -> dict[str, int]:
    """Bytes of this process by the kernel's names."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]]
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


if __name__ == "__main__":
    main()
