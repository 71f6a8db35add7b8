"""The run files of configs/reproduce beside the published settings that they reproduce.

For each: network forwards (NFE) that sampling one image takes, with those of classifier-free guidance; steps that are
trained; images of an epoch; optimizer steps of an epoch; images of an optimizer step; and what `retouch check --memory`
counts on a device. The peers' figures stand in peers.json, with their source. They publish no figure of memory, so that
column has only ours.

    python benchmarks/peer_settings.py                # the table
    python benchmarks/peer_settings.py --out benchmarks/results/peer_settings.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from retouch.config import RunConfig, derive, load_run
from retouch.config.derived import sampling_forwards
from retouch.doctor.memory import report_memory

HERE = Path(__file__).resolve().parent
FILES = HERE.parent / "configs/reproduce"
SHOWN = ("nfe_per_image", "trained_steps", "images_per_epoch", "optimizer_steps_per_epoch", "images_per_step")
COMPARED = (*SHOWN, "resolution")
VARIABLES = ("IMAGE_ROOT", "DATA_PATH", "EVAL_DATA_PATH")
"""Of the run files; no data are read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    rows = [row(path) for path in sorted(FILES.glob("*.yaml"))]
    print(table(rows))
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


def row(path: Path) -> dict[str, Any]:
    """One run file: `ours`, `peer`, and what they differ in."""
    for name in VARIABLES:
        os.environ.setdefault(name, "images")
    run = load_run(path)
    peer = peers()[path.stem]
    ours = {**settings(run, peer["gpus"]), "device_gib": round(report_memory(run)["device_bytes"] / 2**30, 1)}
    theirs = published(peer)
    differing = [name for name in COMPARED if ours[name] != theirs[name]]
    return {"file": path.stem, "source": peer["source"], "ours": ours, "peer": theirs, "differing": differing}


def peers() -> dict[str, dict[str, Any]]:
    """Run file -> published settings."""
    return json.loads((HERE / "peers.json").read_text(encoding="utf-8"))


def settings(run: RunConfig, world_size: int) -> dict[str, Any]:
    """Of a run on as many devices as the peer has."""
    derived = derive(run, world_size)
    scale = run.model.guidance_scale if run.rollout.guidance_scale is None else run.rollout.guidance_scale
    copies = getattr(run.algorithm, "timesteps_per_pair", derived.trained_steps)
    return {
        "resolution": run.data.size[0],
        "nfe_per_image": sampling_forwards(run) * run.model.forwards_of_guidance(scale),
        "trained_steps": getattr(run.algorithm, "timesteps_per_image", copies),
        "images_per_epoch": derived.global_images_per_epoch,
        "optimizer_steps_per_epoch": derived.optimizer_steps_per_epoch,
        "images_per_step": derived.global_images_per_epoch / derived.optimizer_steps_per_epoch,
        "forwards_per_image": derived.forwards_per_image,
    }


def published(peer: dict[str, Any]) -> dict[str, Any]:
    """The same numbers from a peer's config."""
    return {
        "resolution": peer["resolution"],
        "nfe_per_image": peer["num_steps"] * (2 if peer["doubled"] else 1),
        "trained_steps": peer["trained_steps"],
        "images_per_epoch": peer["group_size"] * peer["groups"],
        "optimizer_steps_per_epoch": peer["optimizer_steps_per_epoch"],
        "images_per_step": peer["group_size"] * peer["groups"] / peer["optimizer_steps_per_epoch"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; where the two differ, both numbers."""
    lines = [
        "| run file | NFE | trained steps | images an epoch | updates an epoch | images an update | GiB | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        cells = [_both(entry, name) for name in SHOWN]
        lines.append(f"| {entry['file']} | {' | '.join(cells)} | {entry['ours']['device_gib']} | {entry['source']} |")
    return "\n".join(lines)


def _both(entry: dict[str, Any], name: str) -> str:
    ours, peer = entry["ours"][name], entry["peer"][name]
    return f"{ours:g}" if ours == peer else f"{ours:g} (peer {peer:g})"


if __name__ == "__main__":
    main()
