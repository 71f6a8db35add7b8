"""The committed transfer and hacking index of four readers: of the run files in the tree, and those of the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import readers  # noqa: E402
from inputs import inputs  # noqa: E402

RESULT = "benchmarks/results/readers.json"
ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / RESULT).read_text(encoding="utf-8"))["rows"]
PAGE = (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_a_row_follows_from_its_means(row: dict[str, Any]) -> None:
    """Gains are differences of the means, shares their ratios, the index the rest."""
    assert row["inputs"] == inputs(readers.file_of(row["algorithm"]))
    trained, untouched = readers.ALGORITHMS[row["algorithm"]], [n for n in row["gain"] if n != row["trained"]]
    assert row["trained"] == trained and row["images"] == readers.IMAGES
    assert untouched == [name for name in readers.READERS if name != trained]
    gain = {name: values[0] for name, values in row["gain"].items()}
    for name in row["held_out"]["last"]:
        apart = row["held_out"]["last"][name] - row["held_out"]["warmed up"][name]
        assert apart == pytest.approx(gain[name], abs=2e-4)
    for name in untouched:
        assert row["transfer"][name][0] == pytest.approx(gain[name] / gain[trained], abs=1e-3)
    index = gain[trained] - sum(gain[name] for name in untouched) / len(untouched)
    assert row["hacking_index"][0] == pytest.approx(index, abs=2e-4)
    for values in (*row["gain"].values(), *row["transfer"].values(), row["hacking_index"]):
        assert values[1] <= values[0] <= values[2]


def test_the_table_by_hand() -> None:
    row = {
        "algorithm": "grpo", "seed": 0, "trained": "ocr", "gain": {"ocr": [0.1786, 0.1431, 0.2142]},
        "transfer": {name: [0.5, 0.25, 1.125] for name in ("easyocr", "tesseract", "ddddocr")},
        "hacking_index": [-0.01, -0.05, 0.03],
    }  # fmt: skip
    share = ".50 [.25, 1.12]"
    assert readers.table([row]).splitlines()[2] == (
        f"| grpo | 0 | ocr: +.179 [+.143, +.214] | trained | {share} | {share} | {share} | -.010 [-.050, +.030] |"
    )


def test_the_ranges_of_the_page() -> None:
    """Of every committed run; each share's interval is above 0: every reader confirms a part of every gain."""
    prose = " ".join(PAGE.split())
    for name, shown in (("easyocr", "EasyOCR"), ("tesseract", "tesseract"), ("ddddocr", "ddddocr")):
        shares = [row["transfer"][name] for row in ROWS]
        low, high = (f"{end(share[0] for share in shares):.2f}".lstrip("0") for end in (min, max))
        assert f"{shown} {low} to {high}" in prose
        assert all(share[1] > 0 for share in shares)
        assert f"{shown} {ROWS[0]['signs'][name]:.3f}".replace(" 0.", " .") in prose
    for trained, words in (
        ("recognizer", "a hacking index of {} to {} ({} to {} % of its gain, beside four other readers)"),
        ("ocr", "GRPO and NFT have {} to {} ({} to {} %, beside three)"),
    ):
        runs = [row for row in ROWS if row["trained"] == trained]
        found = [row["hacking_index"][0] for row in runs]
        ends = [f"{end(found):+.3f}".replace("0.", ".", 1) for end in (min, max)]
        parts = [100 * row["hacking_index"][0] / row["gain"][trained][0] for row in runs]
        assert words.format(*ends, *(f"{end(parts):.0f}" for end in (min, max))) in prose
    pixels = [row for row in ROWS if row["trained"] == "recognizer"]
    assert all(row["hacking_index"][1] > 0 for row in pixels)
    for algorithm in ("grpo", "nft"):
        above = [row["hacking_index"][1] > 0 for row in ROWS if row["algorithm"] == algorithm]
        assert (sum(above), len(above)) == (2, 3) and "on two of three seeds each" in prose
    assert all(row["signs"] == ROWS[0]["signs"] for row in ROWS)
    least = min(share[0] for row in ROWS for name, share in row["transfer"].items() if name in readers.READERS)
    advice = " ".join((REPOSITORY / "docs/rewards.md").read_text(encoding="utf-8").split())
    assert f"the three readers confirm {least:.2f} or more".replace(" 0.", " .") in advice
