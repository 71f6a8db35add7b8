"""Functions whose fault a whole run shows at a hundred times the cost; each on the smallest input that shows it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from retouch.algorithms.vlm_grpo.scoring import noise_seeds
from retouch.config import trust
from retouch.core.advantages import RewardRows
from retouch.core.schedule import AlphaBarSchedule
from retouch.data import tables
from retouch.data.base import ItemFiles
from retouch.data.identity import item_key
from retouch.data.sampler import derive_seed
from retouch.data.tables import content_digest
from retouch.errors import OutOfMemory, RewardOutage, fitting
from retouch.families.embeddings import EmbeddingCache
from retouch.files.model_files import incomplete_weights
from retouch.observe.kept import kept_rows
from retouch.observe.sinks import Wandb
from retouch.observe.statistics import bootstrap_percentiles
from retouch.process import console
from retouch.rewards.client.exchange import no_answer
from retouch.rewards.client.servers import Server
from retouch.rewards.table import Place, Scores
from retouch.rewards.views import View
from retouch.rollout.encoded import drop_references
from retouch.rollout.sampler import noise_for
from retouch.training.resume import evaluation_stands
from retouch.types import Condition, Failure, Outcome, Score
from retouch.use import benchmark_scores
from retouch_bench.benchmarks.geneval import GenEval

AWAY = Failure("unavailable", "no server answered", retryable=True)
BAD = Failure("bad_item", "no mask")


def test_seeds_and_keys_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Checkpoints hold them: a resumed run that derived others would draw other noise and refuse its own data."""
    assert derive_seed(5, "noise", 17, 2) == 8359589046943993399
    (tmp_path / "source.png").write_bytes(b"one image")
    assert item_key(ItemFiles(3, "a sign", tmp_path / "source.png", target="source")) == 4876320882822723830


def test_content_is_held_out_whatever_its_name_is(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"one image")
    assert content_digest(tmp_path / "a.png") == content_digest(tmp_path / "b.png") != content_digest("another")


def test_rows_of_an_evaluation_that_are_fewer_than_were_written_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"example": 1, "index": 0, "r": 0.5}) + "\n", encoding="utf-8")
    counts = [kept_rows(tmp_path, images) is not None for images in (None, 1, 2)]
    assert counts == [True, True, False]


@pytest.mark.parametrize(("record", "stands"), [({"r": 0.5}, True), ({}, False), ({"r": 0.5, "failed": 1}, True)])
def test_an_evaluation_in_which_every_reward_failed_does_not_stand(record: dict[str, float], stands: bool) -> None:
    rewards: Any = SimpleNamespace(evaluated=["r"])
    assert evaluation_stands([{"kind": "eval", "step": 4, "failed": 0, **record}], 4, rewards) is stands


def test_a_row_that_loses_its_caption_loses_its_reference() -> None:
    condition = Condition({"reference_keep": torch.ones(3)}, None, (32, 32))
    kept = drop_references(condition, 0.0, [1, 2, 3], [False, True, False]).tensors["reference_keep"]
    assert kept.tolist() == [1, 0, 1]


def test_a_failure_of_a_reward_of_weight_0_leaves_the_row_usable() -> None:
    rows = RewardRows(
        names=["trained", "logged"],
        values=torch.ones(3, 2),
        valid=torch.tensor([[True, False], [False, True], [True, True]]),
        weights=torch.tensor([1.0, 0.0]),
        example_index=torch.arange(3),
        index=torch.zeros(3, dtype=torch.int64),
        padding=torch.tensor([False, False, True]),
    )
    assert rows.usable.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("column", "answer"), [([AWAY, AWAY], False), ([AWAY, BAD], False), ([BAD, BAD], True), ([AWAY, Score(1.0)], True)]
)
def test_a_reply_in_which_the_server_failed_every_item_is_no_answer(column: list[Outcome], answer: bool) -> None:
    assert (no_answer(column) is None) is answer


@pytest.mark.parametrize(("number", "told"), [(errno.ENOSPC, True), (errno.EPIPE, False)])
def test_only_results_that_nobody_wanted_any_more_may_be_lost(
    number: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "output_problem", lambda _: OSError(number, "why"))
    assert (console.results_problem() is not None) is told


def test_a_jpeg_file_keeps_its_format(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.jpg")
    assert benchmark_scores.saved_image(tmp_path / "a.jpg").format == "JPEG"


@pytest.mark.parametrize("sound", [True, False])
def test_an_evaluation_ends_if_its_scorer_fails_a_sound_image_too(sound: bool) -> None:
    class Table:
        def submit(self, items: Sequence[object], *, training: bool) -> Any:
            del items, training
            return SimpleNamespace(result=lambda: Scores({"r": [Score(0.5) if sound else AWAY]}, {"r": 1.0}))

    table: Any = Table()
    try:
        benchmark_scores._require_answers(table, ["r"], {"r": [AWAY, AWAY]})
    except RewardOutage:
        assert not sound
    else:
        assert sound


def test_consent_to_a_run_is_consent_to_its_run_file(tmp_path: Path) -> None:
    """And of no copy."""
    assert trust._record(tmp_path, b"a: 1") == trust._record(tmp_path, b"a: 1") != trust._record(tmp_path, b"a: 2")
    assert trust._record(tmp_path, b"a: 1") != trust._record(tmp_path / "copy", b"a: 1")


def test_noise_is_fp32_whatever_a_library_left_behind() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert noise_for([2], [0])[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_completions_of_an_example_have_one_noise() -> None:
    examples: Any = [SimpleNamespace(id=id) for id in (7, 7, 8)]
    first, second, other = noise_seeds("draw", 1, examples, 0)
    assert first == second != other


def test_memory_that_ends_is_one_line_with_a_remedy() -> None:
    line = r"^out of memory while sampling \(all is in use\); set size=1$"
    with pytest.raises(OutOfMemory, match=line), fitting("while sampling", "size=1"):
        raise torch.OutOfMemoryError("all is in use")


def test_a_data_set_at_a_commit_is_read_at_that_commit() -> None:
    assert tables._revision("some/set") == {}
    assert tables._revision(f"hf://datasets/some/set@{'c' * 40}") == {"revision": "c" * 40}


def test_without_a_hub_nobody_knows_the_configurations_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lists one, "default", whichever were downloaded."""
    library = SimpleNamespace(get_dataset_config_names=lambda *_, **__: ["default"])
    monkeypatch.setattr(tables, "_hub_library", lambda _: library)
    monkeypatch.setattr(tables, "hub_problem", lambda: "offline")
    assert tables.hub_configurations("some/set") is None


def test_wandb_has_the_step_among_the_numbers() -> None:
    """Its own steps only grow: it would drop those that a resumed run takes again."""
    logged: list[Any] = []
    sink = object.__new__(Wandb)
    sink._run = SimpleNamespace(log=lambda *values, **options: logged.append((values, options)))
    sink.numbers({"train/loss": 0.5}, 3)
    assert logged == [(({"train/loss": 0.5, "step": 3},), {})]


def test_an_excused_failure_is_taken_back() -> None:
    server = Server("http://127.0.0.1:9", failures=1)
    counts = []
    for _ in range(2):
        server.excused()
        counts.append(server.failures)
    assert counts == [0, 0]


def test_only_rewards_that_count_are_waited_for() -> None:
    counts, logged = Future[Any](), Future[Any]()
    parts = {Place((), View(), kind): future for kind, future in (("logged", logged), ("counts", counts))}
    assert Scores({}, {}, parts=parts).weighted_futures == [counts]


def test_a_table_of_noise_levels_is_made_once_for_a_device() -> None:
    """The CPU waits for a copy."""
    schedule = AlphaBarSchedule.make(torch.linspace(0.9, 0.1, 10), 2)
    made = []
    for _ in range(2):
        schedule.level(schedule.times)
        made.append(schedule._tables[schedule.times.device])
    assert made[0] is made[1]


def test_entries_of_embeddings_are_found_by_all_of_their_content(tmp_path: Path) -> None:
    cache = object.__new__(EmbeddingCache)
    cache.folder, cache._made_with = tmp_path, {"family": "flux_fill", "text_files": "1"}
    assert len({cache._path("text", content) for content in (b"a sign", b"a shop", b"b")}) == 3


def test_the_percentiles_of_a_bootstrap_are_wider_the_fewer_units_there_are() -> None:
    """Closed form: the normal's quantile stretched to Student's and by sqrt(n / (n - 1))."""
    t_of_four_degrees = 2.7764
    assert bootstrap_percentiles(5)[0] == pytest.approx(
        100 * NormalDist().cdf(-t_of_four_degrees * (5 / 4) ** 0.5), abs=1e-4
    )
    assert bootstrap_percentiles(10_000) == pytest.approx([2.5, 97.5], abs=0.01)


def test_a_prompt_that_a_sample_has_twice_counts_twice() -> None:
    def row(key: str, index: int, right: bool) -> Any:
        score = Score(float(right), {"correct": right})
        return SimpleNamespace(
            key=key, index=index, metadata={"tag": "counting"}, score=lambda name: score if name == "geneval" else None
        )

    drawn = [row("a", 0, True), row("a", 1, False), row("a", 0, True), row("a", 1, False), row("b", 0, False)]
    found: Mapping[str, float] = GenEval.summary(object.__new__(GenEval), drawn)
    assert found["prompts"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("length", "problem"), [(88, None), (80, "has 80 bytes, 88 are expected"), (4, "only the")])
def test_a_file_of_weights_that_is_only_begun_is_named(length: int, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "Network"}', encoding="utf-8")
    save_file({"weight": torch.zeros(4)}, tmp_path / "diffusion_pytorch_model.safetensors")
    os.truncate(tmp_path / "diffusion_pytorch_model.safetensors", length)
    found = incomplete_weights(tmp_path, None)
    assert (found is None) == (problem is None) and (problem or "") in (found or "")
