"""The committed ratios of fused LoRA layers and of NFT's memory, and that the scripts run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import fused_lora  # noqa: E402
import nft_memory  # noqa: E402

PAGE = " ".join((REPOSITORY / "docs/speed.md").read_text(encoding="utf-8").split())


def result(name: str) -> dict[str, Any]:
    return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def test_the_page_has_the_ratio_of_fused_lora() -> None:
    found = result("fused_lora")
    assert found["ratio"] < 1 and found["largest_relative_difference"] < 1e-6
    assert f"takes {found['ratio']:.2f} of the CPU time" in PAGE
    assert f"no time on a CPU ({found['bf16']['ratio']:.2f} x" in PAGE


@pytest.mark.full
def test_both_kinds_of_layers_are_measured_and_agree() -> None:
    found = fused_lora.measure(tokens=4, rows=1, repetitions=1)
    assert found["cpu_s"].keys() == {"peft", "fused", "off"} and found["largest_relative_difference"] < 1e-5
    assert fused_lora.without_autocast(tokens=4, rows=1, repetitions=1)["ratio"] > 0


def test_the_graph_of_an_epoch_of_flux_does_not_fit() -> None:
    """Peak less what is held, by images of a forward times trained steps; both cells agree."""
    found = result("gpu")
    rows = {row["speed"]: row for row in found["rows"] if row["case"] == "flux_fill-lora" and "step_s" in row}
    each = {
        speed: (row["peak_memory_gib"] - row["held_gib"]) / row["settings"]["batch_size_per_device"] / steps
        for (speed, row), steps in zip(rows.items(), (2, 1), strict=True)
    }
    assert [round(value) for value in each.values()] == [9, 9]
    memory = found["machine"]["gpu_memory_gib"]
    images = int((memory - rows["fast"]["held_gib"]) / (2 * each["fast"]))
    assert f"keeps {each['fast']:.0f} GiB per image" in PAGE
    assert f"could have {images} images on a GPU of {memory:.0f} GiB" in PAGE


def test_the_page_has_the_peak_of_nft() -> None:
    found = result("nft_memory")
    assert found["peak_ratio"] < 0.5
    kept, again = (found["peak_mib"][arm] for arm in nft_memory.ARMS)
    assert f"from {kept:.0f} to {again:.0f} MiB" in PAGE
    copies = 2 * found["images"] - 2 * found["rows_per_forward"]
    assert kept - again > copies * found["condition_mib_per_copy"]  # all conditions but those of one forward
