"""Arithmetic and settings of the race beside the peers. The peers themselves are not installed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import peer_race
from retouch.config import parse_run
from retouch.config.derived import derive

REPOSITORY = Path(__file__).parents[2]
RESULT = json.loads((REPOSITORY / "benchmarks/results/peer_race.json").read_text(encoding="utf-8"))


def test_the_page_holds_the_measured_rows() -> None:
    page = (REPOSITORY / "docs/speed.md").read_text(encoding="utf-8")
    lines = peer_race.table(RESULT["rows"])
    assert [line for line in page.splitlines() if line in lines] == lines
    flat = " ".join(page.lower().split())
    assert all(f"{peer} {commit}" in flat for peer, commit in RESULT["peers"].items())


def test_every_measured_row_did_equal_work_and_is_not_behind() -> None:
    """At least 7 pairs; equal forwards but for `fast`, whose steps are fewer, and but for the counted first epoch of
    DiffusionNFT, in which the old policy is the trained one and ours leaves its forwards out."""
    for row in RESULT["rows"]:
        ours, theirs = row["forwards"]["ours"], row["forwards"]["theirs"]
        assert row["pairs"] >= 7 and max(ours["text"]) == max(theirs["text"])
        old = ours["trained_rows"] if "NFT" in row["row"] else 0
        equal = (ours["rows"] + old, ours["trained_rows"]) == (theirs["rows"], theirs["trained_rows"])
        assert equal or row["row"].startswith("fast")
        assert row["interval_without_decoder"][0] <= 1 and row["memory"] <= 1.05


def test_rows_of_the_network_in_an_epoch_of_fast() -> None:
    """Two groups of eight: steps up to the first of the window take two rows, those after it 16; in each of two
    optimizer steps that first one takes two, and the other of the window eight."""
    [row] = [row for row in RESULT["rows"] if row["row"].startswith("fast")]
    sampled = {first: (first + 1) * 2 + (6 - first - 1) * 16 for first in range(3)}
    assert {rows for rows, _ in row["rows_of_epochs"]["ours"]} == {*sampled.values()} == {82, 68, 54}
    assert {trained for _, trained in row["rows_of_epochs"]["ours"]} == {2 * (2 + 8)}
    assert row["rows_of_epochs"]["theirs"] == [[160, 16]] * row["pairs"] and row["interval"][1] <= 0.62
    page = " ".join((REPOSITORY / "docs/speed.md").read_text(encoding="utf-8").split())
    assert "samples 82, 68 or 54 rows of the network by the place of its window, and trains 20" in page


def test_the_interval_of_a_median_by_hand() -> None:
    """Of 7 the smallest and the largest hold it with 1 - 2/128; of 9 the second and the last but one with 1 - 20/512;
    of 5 none do with 95 %."""
    assert peer_race.interval([float(i) for i in range(7)]) == (0, 6)
    assert peer_race.interval([float(i) for i in range(9)]) == (1, 7)
    assert peer_race.interval([3.0, 4.0, 5.0, 6.0, 7.0]) == (3, 7)


def test_time_without_the_decoder_is_taken_pair_by_pair() -> None:
    ours = [{"cpu_s": 3.0, "decoder_s": 1.0}, {"cpu_s": 5.0, "decoder_s": 2.0}]
    theirs = [{"cpu_s": 6.0, "decoder_s": 2.0}, {"cpu_s": 5.0, "decoder_s": 3.0}]
    assert peer_race.without_decoder({"ours": ours, "theirs": theirs}) == [0.5, 1.5]


@pytest.mark.parametrize("row", peer_race.ROWS, ids=lambda row: row.name)
def test_our_side_has_the_images_and_steps_of_the_other(row: peer_race.Row, tmp_path: Path) -> None:
    """16 images in two optimizer steps; DiffusionNFT and flow_grpo take one."""
    run = parse_run(peer_race.our_file(row, tmp_path, tmp_path / "train.txt", tmp_path))
    numbers = derive(run, 1)
    assert numbers.images_per_epoch_per_device == row.images
    one = run.algorithm.name == "nft" or row.peer == "flow_grpo"
    assert numbers.optimizer_steps_per_epoch == (1 if one else 2)
    if row.peer == "flow-factory":
        theirs = peer_race.their_file(row, tmp_path, tmp_path, tmp_path)["train"]
        assert theirs["unique_sample_num_per_epoch"] * theirs["group_size"] == row.images
        assert theirs["gradient_step_per_epoch"] == numbers.optimizer_steps_per_epoch
