"""The second device: what it refuses, counts and runs out of."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import forked

PROGRAM = """
import io

import torch
from tests.rehearsal.device import capacity, memory, recorded, rehearse

device = rehearse()


def refused(use, text):
    try:
        use()
    except (RuntimeError, TypeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


one, other = torch.ones(3, device=device), torch.ones(3)
refused(lambda: one + other, "one device")
refused(lambda: other[torch.tensor([1], device=device)], "one device")
refused(lambda: other.add_(one), "one device")
refused(lambda: one.numpy(), "to numpy")
refused(lambda: torch.randn(2, device=device, generator=torch.Generator()), "generator")
assert (one + torch.tensor(2.0)).device.type == device.type, "a scalar of the CPU may join"
draw = torch.randn(4, device=device, generator=torch.Generator(device).manual_seed(3))
assert draw.tolist() == torch.randn(4, generator=torch.Generator().manual_seed(3)).tolist()
assert torch.arange(5, device=device).tolist() == [0, 1, 2, 3, 4]

turn = torch.tensor([1 + 2j])
assert (turn.to(device) * turn.to(device).conj()).cpu().tolist() == (turn * turn.conj()).tolist() == [5 + 0j]
with torch.device("meta"):
    assert torch.tensor([1]).device.type == torch.randn(1).device.type == "meta"

with recorded() as record:
    there = other.to(device)
    there[torch.tensor([0, 2])]
    there.cpu()
    bool(there.sum() > 1), there.tolist(), there.nonzero(), there[there > 0]
assert (record.to_device, record.to_host, record.moves) == (12 + 16, 12, 2), record
assert record.waits == {"to_host": 1, "_local_scalar_dense": 1, "tolist": 1, "nonzero": 1, "mask": 1}, record


def trained(where):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1)).to(where)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        net(torch.ones(5, 3).to(where)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.parameters()]


there, here = trained(device), trained("cpu")
assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))

assert torch.tensor([one[0], 2], device=device).tolist() == [1, 2]
moved = torch.nn.Parameter(torch.ones(2))
moved.data = moved.data.to(device)
assert moved.device == device and isinstance(moved, torch.nn.Parameter) and moved.requires_grad
file = io.BytesIO()
torch.save({"moment": moved.detach()}, file)
for place, kind in (("cpu", "cpu"), (None, device.type)):
    file.seek(0)
    assert torch.load(file, map_location=place)["moment"].device.type == kind

del one, there, draw, moved
used = memory.used
with capacity(used + 4096):
    kept = torch.ones(512, device=device)
    try:
        torch.ones(1024, device=device)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("more than there is")
    assert memory.used == used + 2048
    del kept
assert memory.used == used
"""


def test_it_is_a_device_of_its_own() -> None:
    root = str(Path(__file__).parents[2])
    done = forked.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{PROGRAM}"])
    assert done.returncode == 0, done.stderr
