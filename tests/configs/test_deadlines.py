"""Deadlines of the published files: an epoch's images at one server, and a busy judge's questions, are done in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from retouch.config import derive, load_run
from retouch.rewards.scorers.judged import JudgeEntry

from .conftest import RUNS, VLM_RUNS, name_of

SECONDS = {"ocr": 0.7, "style": 0.8}
OTHER_SECONDS = 1.0
"""Of one image of 512 pixels at `url: auto`, measured with `retouch reward probe` on two cores that other programs
shared: reading, and for style an encoder on a GPU (on these cores it takes 4 s more). docs/reward-servers.md has the
table."""

JUDGE_SECONDS = 20.0
"""Of one question about one image to a vision-language model on a busy machine."""

PROCESSES = 8

RELEASED = [path for path in (*RUNS, *VLM_RUNS) if path.parent.name != "tiny"]


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_the_deadline_of_a_request_covers_what_one_server_has_to_do(path: Path) -> None:
    """All processes of a machine share the server; each has `requests_per_server` requests under way, and an epoch
    bounds what can be waiting."""
    run = load_run(path)
    served = {name: entry for name, entry in run.rewards.items() if entry.url == "auto"}
    if not served:
        return
    client, derived = run.reward_client, derive(run, PROCESSES)
    under_way = PROCESSES * client.requests_per_server * client.batch_size
    waiting = min(under_way, max(derived.global_images_per_epoch, run.evaluation.num_examples))  # type: ignore[union-attr]
    needed = waiting * sum(SECONDS.get(entry.scorer, OTHER_SECONDS) for entry in served.values())
    assert client.timeout_s >= needed, f"set reward_client.timeout_s to {needed:.0f} or more"


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_the_deadline_of_a_question_covers_a_judge_that_answers_one_at_a_time(path: Path) -> None:
    for name, entry in load_run(path).rewards.items():
        if isinstance(entry, JudgeEntry):
            needed = JUDGE_SECONDS * entry.concurrency
            assert entry.timeout_s >= needed, f"set rewards.{name}.timeout_s to {needed:.0f} or more"


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_the_style_scorer_computes_where_the_run_trains(path: Path) -> None:
    """A SigLIP so400m takes 4 s an image on two cores."""
    assert {entry.device for entry in load_run(path).rewards.values() if entry.scorer == "style"} <= {"auto"}
