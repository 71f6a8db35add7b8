"""The rows of a mid-epoch checkpoint of several processes: the first receives and writes them, each reads its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked

from .test_two_ranks import TORCHRUN

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
torch.set_num_threads(1)
from retouch.config.run import OptimizerConfig, TrainingConfig
from retouch.engine import Checkpoints, Engine, Policy
from retouch.engine import engine as engines

class Network(nn.Linear):
    def enable_gradient_checkpointing(self): ...

gathered, real = [], engines.gather_list
engines.gather_list = lambda values: gathered.append(repr(values)) or real(values)
apart = sys.argv[2] == "apart"
if apart:
    group = torch.distributed.new_group
    def new_group(*given, **named):
        made = group(*given, **named)
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("gloo: unable to resolve hostname to a loopback address")
        return made
    torch.distributed.new_group = new_group
engine = Engine(TrainingConfig(max_steps=1, mixed_precision="no"), OptimizerConfig(), 0)
network = Network(2, 2)
engine.prepare(network, gradient_checkpointing=False)
engine.new_optimizer()
out, rank = Path(sys.argv[1]), engine.rank
save = lambda weights, folder: (folder.mkdir(), torch.save(dict(weights), folder / "w.pt"))
checkpoints = Checkpoints(out / "checkpoints", save, lambda folder: torch.load(folder / "w.pt"))
draw = torch.Generator().manual_seed(rank)
rows = {
    "latents": torch.randn(3 + rank, 2, 5, generator=draw).transpose(1, 2),
    "seed": torch.arange(3 + rank) + 10**12 * rank,
    "none": torch.zeros(0),
    "flag": torch.tensor([True, rank == 1]),
    "half": torch.randn(4, generator=draw).bfloat16(),
}
found = engine.tensors_on_first(rows)
assert len(found) == (2 if rank == 0 else 0)
for number in (1, 2):
    folder = checkpoints.save(number, engine, Policy(network), {"progress": {"step": number}}, rows)
_, kept = checkpoints.load(folder, engine, Policy(network))
assert kept.keys() == rows.keys()
for name, tensor in rows.items():
    assert kept[name].dtype == tensor.dtype and torch.equal(kept[name], tensor), name
assert any("tensor(" in values for values in gathered) == apart, gathered
(out / f"{rank}.json").write_text(json.dumps(len(gathered)))
engine.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("gloo", ["connected", "apart"])
def test_each_process_reads_its_own_rows_again(gloo: str, tmp_path: Path) -> None:
    """Any dtype and shape, other numbers of rows on each, nothing pickled; also where gloo does not start on one."""
    child = tmp_path / "child.py"
    child.write_text(CHILD, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = forked.run([sys.executable, *TORCHRUN, str(child), str(tmp_path), gloo], env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "0.json").read_text()) == json.loads((tmp_path / "1.json").read_text())
    files = [file.name for file in (tmp_path / "checkpoints" / "step-000002").iterdir()]
    assert files.count("rollouts.safetensors") == 1
