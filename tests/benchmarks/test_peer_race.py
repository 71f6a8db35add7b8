"""Arithmetic and settings of the race beside the peers. The peers themselves are not installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import peer_race
from retouch.config import parse_run
from retouch.config.derived import derive


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
