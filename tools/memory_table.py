"""Write docs/memory.md: what each family and kind of training stores on a GPU, and the GPUs that it fits on.

python tools/memory_table.py            # write docs/memory.md
python tools/memory_table.py --print    # print it

Counted from the released sizes that the families record, on the meta device: no download, no weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retouch.config import ConfigError, RunConfig, parse_run
from retouch.doctor.line import size
from retouch.doctor.memory import Counted, count_weights, device_bytes, memory_parts
from retouch.doctor.networks import Networks, released_parts
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec

PAGE = Path(__file__).resolve().parents[1] / "docs/memory.md"

CLASSES = (24, 48, 80, 141)
"""Gigabytes (10^9 bytes) of a GPU."""

SHARE = 0.8
"""Part of a GPU that stored bytes may take; the rest is for activations."""

PROCESSES = (2, 4, 8)
"""GPUs that weights are sharded over where one is too small."""

HEAD = """# Memory by GPU

The table lists the memory that a run stores on a GPU before activations, at the released sizes of each family. For
GPUs of four sizes, it gives the first setting of `model.quantize` or `training.sharding` with which the run fits.
`python tools/memory_table.py` writes this page from the counts of `retouch check --memory`.

| family | trained | stored | {gpus} |
|---|---|---|{rules}|
"""

TAIL = """
- **stored**: bytes on the device of one process: weights, gradients, AdamW's moments and the autoencoder, with GRPO
  without a KL, EMA weights, LoRA of rank 32 or the default style adapter, and frozen weights in bf16. Text encoders
  wait on the CPU (`model.offload_text_encoders`).
- **bf16**: fits as it is (frozen weights in bf16, trained ones in fp32). **int8**, **nf4**: fits with
  [`model.quantize`](lora.md#quantized-base); int8 stands for fp8 as well. **nf4, embeddings**: fits if, in addition,
  `retouch data precompute` has stored the text embeddings (`model.embeddings`); no text encoder is loaded then.
  **N × fsdp2**, **N × zero2**: fits sharded over N GPUs of this size (`training.sharding`). **-**: does not fit on
  {most} of them.
- A run fits if it stores at most {share} % of the GPU ({smallest} GB of 24), and if its largest text encoder fits
  beside it while it encodes prompts. Activations take the rest: they grow with `optimizer.batch_size_per_device`, the
  resolution and `optimizer.steps_per_forward`; see [Troubleshooting](troubleshooting.md#out-of-memory).
- DPO, DiffusionNFT and a KL keep snapshots, with 4 more bytes per trained parameter for each.
  `retouch check RUN.yaml --memory` counts your run.
"""

UNKNOWN = """- *: without {names}, whose sizes the package does not record.
"""


@dataclass(frozen=True)
class Row:
    """One kind of training of a family.

    Attributes:
        stored: bytes on one GPU; None where the family records no released sizes.
        cells: for each class of GPUs, the first setting that fits.
    """

    kind: str
    stored: int | None
    cells: tuple[str, ...]


def run_of(spec: FamilySpec, kind: str, **options: Any) -> RunConfig:
    """A GRPO run of a family; `options` by section."""
    own = {"family": spec.family, "path": spec.hub_ids[0] if spec.hub_ids else "somewhere", "train": {"kind": kind}}
    return parse_run(
        {
            "name": "memory",
            "model": {**own, **options.get("model", {})},
            "data": {"format": "manifest", "path": "somewhere"},
            "algorithm": {"name": "grpo"},
            "rewards": {"ocr": {}},
            "ema": {"decay": 0.999},
            "training": options.get("training", {}),
        }
    )


def known_networks(spec: FamilySpec) -> Networks:
    """Networks of a family at their released sizes, as far as it records them."""
    parts = released_parts(spec)
    width = None if spec.adapter is None else spec.adapter.width
    return Networks(parts, None, width, parts.keys() == spec.networks.keys())


def rows(spec: FamilySpec, networks: Networks) -> Iterator[Row]:
    """A row for each kind of training that the family takes."""
    for kind in ("lora", "ip_adapter", "full"):
        if kind == "ip_adapter" and spec.adapter is None:
            continue
        counted = count_weights(run_of(spec, kind), networks)
        if counted is None:
            yield Row(kind, None, ("?",) * len(CLASSES))
            continue
        settings = list(ways(spec, kind, networks))
        cells = tuple(next((name for name, need in settings if fits(need, gb)), "-") for gb in CLASSES)
        yield Row(kind, device_bytes(run_of(spec, kind), counted), cells)


def ways(spec: FamilySpec, kind: str, networks: Networks) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name of a setting, (bytes stored, bytes while a text encoder encodes)), in the order they are tried in."""
    if kind == "full":
        yield "bf16", bytes_of(run_of(spec, kind), networks)
    else:
        for name in ("bf16", "int8", "nf4"):
            quantize = None if name == "bf16" else name
            yield name, bytes_of(run_of(spec, kind, model={"quantize": quantize}), networks)
        with suppress(ConfigError):  # text encoders that read images with the prompt
            stored = run_of(spec, kind, model={"quantize": "nf4", "embeddings": "somewhere"})
            yield "nf4, embeddings", bytes_of(stored, without_text(networks))
    sharding = "zero2" if kind == "ip_adapter" else "fsdp2"
    try:
        run = run_of(spec, kind, training={"sharding": sharding})
    except ConfigError:  # it takes sharded weights only in batches of one image
        sharding = "zero2"
        run = run_of(spec, kind, training={"sharding": sharding})
    for count in PROCESSES:
        yield f"{count} × {sharding}", bytes_of(run, networks, count)


def without_text(networks: Networks) -> Networks:
    return replace(networks, parts={name: one for name, one in networks.parts.items() if not name.startswith("text_")})


def bytes_of(run: RunConfig, networks: Networks, processes: int = 1) -> tuple[int, int]:
    counted = count_weights(run, networks)
    assert isinstance(counted, Counted), "counted in bf16 before"
    stored = device_bytes(run, counted, processes)
    waiting = [part.bytes for part in memory_parts(run, counted, processes) if part.waits]
    return stored, stored + max(waiting, default=0)


def fits(need: tuple[int, int], gigabytes: int) -> bool:
    stored, encoding = need
    return stored <= SHARE * gigabytes * 10**9 and encoding <= gigabytes * 10**9


def page() -> str:
    """The content of docs/memory.md."""
    gpus = " | ".join(f"{gb} GB" for gb in CLASSES)
    lines: list[str] = []
    unknown: set[str] = set()
    for family, section in FAMILIES.available().items():
        spec = section.spec
        networks = known_networks(spec)
        missing = spec.networks.keys() - networks.parts.keys()
        unknown |= missing
        for row in rows(spec, networks):
            star = "*" if missing else ""
            stored = "not known" if row.stored is None else f"{size(row.stored)}{star}"
            lines.append(f"| `{family}` | `{row.kind}` | {stored} | {' | '.join(row.cells)} |")
    head = HEAD.format(gpus=gpus, rules="|".join("---" for _ in CLASSES))
    tail = TAIL.format(share=round(100 * SHARE), smallest=f"{SHARE * CLASSES[0]:g}", most=PROCESSES[-1])
    return head + "\n".join(lines) + "\n" + tail + (UNKNOWN.format(names=named(unknown)) if unknown else "")


def named(components: set[str]) -> str:
    """ "the autoencoder and the text encoders"."""
    kinds = {"the autoencoder" if name == "vae" else "text encoders" for name in components}
    return " and ".join(sorted(kinds, reverse=True))


def main() -> None:
    if "--print" in sys.argv[1:]:
        print(page(), end="")
        return
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
