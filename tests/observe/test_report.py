"""The report: one file that needs nothing else, true to the run, for any state that a run can be left in."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from retouch.config import load_run
from retouch.errors import ConfigError
from retouch.observe.comparison import write_comparison
from retouch.observe.gallery import image_inside, shown_file
from retouch.observe.report import _has_trained, change_of, milestones, write_report
from retouch.observe.run_lock import RunLock
from retouch.use.ending import ending
from tests.command_line import retouch

VOID = {"meta", "img", "input", "link"}

SCRIPTS = 4
"""Those of a page: two of JSON, uPlot and its own."""


class Page(HTMLParser):
    """What a browser would see: text, tags, and everything that it would fetch or run."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)
        self.close()
        self.data: dict[str, Any] = json.loads(self.scripts[0])
        self.images: list[str] = json.loads(self.scripts[1])
        assert self.open == [], self.open  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.fetched = [value for value in self.fetched if value != "data:,"]  # no icon
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    def curve(self, key: str) -> dict[str, Any]:
        return next(chart for chart in self.data["charts"] if chart["key"] == key)

    def __contains__(self, words: str) -> bool:
        return words in " ".join(" ".join(self.text).split())


def report(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


@pytest.fixture
def run(finished: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a finished run, to change."""
    return shutil.copytree(finished("full"), tmp_path / "full", ignore=shutil.ignore_patterns("checkpoints"))


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the records of a run."""
    metrics = run / "metrics.jsonl"
    records = change([json.loads(line) for line in metrics.read_text().splitlines()])
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_it_needs_no_network(run: Path) -> None:
    page = report(run)
    assert page.fetched and all(value.startswith("data:image/png;base64,") for value in page.fetched)
    assert all(value.startswith("data:image/png;base64,") for value in page.images)
    assert not {"iframe", "object", "embed"} & set(page.tags) and page.tags.count("script") == SCRIPTS
    source = (run / "report.html").read_text()
    assert "@import" not in source and "url(" not in source
    named = set(re.findall(r"https?:[^ \"'`);]*", source))
    assert named == {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}  # a namespace, and a comment
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in source and "unsafe" not in source


def test_it_says_what_the_run_did(run: Path) -> None:
    page = report(run)
    for words in (
        "flux_fill (full), grpo, 4 optimizer steps",
        "from warmed up (step 2) to step 4, on 2 held-out images",
        "Finished step 4 of 4",
        "base (step 0)",
        "last − warmed up [95 %]",
        "Where the time went",
        "max_sequence_length: 24",
        '"torch":',
    ):
        assert words in page, words
    keys = [chart["key"] for chart in page.data["charts"]]
    assert keys.index("rollout/combined_score") < keys.index("eval/preservation") < keys.index("train/loss")
    reward = page.curve("rollout/reward/preservation")
    assert (reward["section"], reward["lines"][0]["x"]) == ("reward", [3])
    assert reward["sentence"].endswith(" Higher is better.")


def test_its_pictures_are_those_of_the_run(run: Path) -> None:
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(value.partition("base64,")[2]))).size for value in report(run).fetched
    ]
    files = [run / "images" / "step-000004" / "evaluation.png", run / "images" / "step-000003" / "rollouts.png"]
    assert pictures == [Image.open(file).size for file in files]


def test_the_time_split_adds_up(run: Path) -> None:
    steps = [
        r["time"]["step"] for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "time" in r
    ]
    page = report(run)
    assert f"of {sum(steps):.1f} s of steps and evaluations" in page


def test_what_was_computed_is_that_of_all_steps(run: Path) -> None:
    """Peaks are peaks, shares are weighted by time, evaluations are no cost of an image."""
    steps = [
        {"step": 1.0, "nfe_rollout": 30.0, "nfe_eval": 500.0, "images": 10.0, "peak_memory_gib": 7.0, "mfu": 0.1},
        {"step": 3.0, "nfe_train_forward": 20.0, "nfe_train_backward": 40.0, "peak_memory_gib": 5.0, "mfu": 0.3},
    ]
    records: list[dict[str, Any]] = [
        {"step": i, "kind": "train", "phase": "rl", "time": t} for i, t in enumerate(steps)
    ]
    rewrite(run, lambda old: [r for r in old if r["kind"] != "train"] + records)
    page = report(run)
    for name, value in {
        "forward-equivalents, train_backward": "40",
        "forward-equivalents for each image": "9",
        "images a second": "2.5",
        "peak of GPU memory, GiB": "7",
        "share of peak FLOP/s": "0.25",
    }.items():
        assert f"{name} {value} " in page, name
    assert "TFLOP/s" not in page


@pytest.mark.parametrize(
    ("gains", "word"),
    [
        ([0.2, 0.3, 0.1, 0.2] * 2, "Better:"),
        ([-0.2, -0.3, -0.1, -0.2] * 2, "Worse:"),
        ([0.2, -0.3, 0.1, -0.2] * 2, "No clear change:"),
        ([0.2, 0.3, 0.1, 0.2, 0.2], "Not judged: 5 examples, and a verdict needs 6:"),
    ],
)
def test_the_verdict_is_what_the_interval_says(run: Path, gains: list[float], word: str) -> None:
    before = [{"example": i, "index": 0, "text": "A", "ocr.ned": 0.5} for i in range(len(gains))]
    after = [{**row, "ocr.ned": 0.5 + gain} for row, gain in zip(before, gains, strict=True)]
    for step, rows in ((2, before), (4, after)):
        file = run / "evaluations" / f"step-00000{step}" / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        mean = sum(row["ocr.ned"] for row in rows) / len(rows)
        rewrite(
            run,
            lambda records, step=step, mean=mean: [
                {**r, "ocr.ned": mean} if (r["kind"], r["step"]) == ("eval", step) else r for r in records
            ],
        )
    page = report(run)
    assert f"{word} from warmed up" in page
    if word == "Better:":  # s = .0755929; .2 ± 2.364624 s / sqrt(8)
        assert "ocr.ned 0.500 → 0.700 (+0.200 [+0.137, +0.263])" in page


def test_images_of_one_example_are_one_of_the_interval(run: Path) -> None:
    """Four images of each of six examples: the interval is that of the six means, .1 ± 2.570582 x .1 / sqrt(6)."""
    before = [{"example": i, "index": j, "ocr.ned": 0.5} for i in range(6) for j in range(4)]
    level = (0.0, 0.2, 0.0, 0.2, 0.1, 0.1)
    noise = (-0.05, 0.05, -0.15, 0.15)
    after = [{**row, "ocr.ned": 0.5 + level[row["example"]] + noise[row["index"]]} for row in before]
    mean, low, high = change_of(before, after, "ocr.ned") or (0, 0, 0)
    assert (mean, low, high) == pytest.approx((0.1, 0.1 - 0.0938638, 0.1 + 0.0938638), abs=1e-6)  # s = .0894427


def test_evaluations_of_other_settings_are_left_out(run: Path) -> None:
    """A difference from them would be that of the settings; the printed gain leaves them out, too."""
    (run / "config-000003.yaml").write_text((run / "config.yaml").read_text().replace("num_steps: 3", "num_steps: 5"))
    page = report(run)
    assert "No evaluation to compare yet. Evaluations up to step 2 were sampled or scored with other" in page
    assert "last (step 4)" in page and "base (step 0)" not in page and "warmed up (step 2)" not in page
    assert ending(load_run(run / "config.yaml", trust=True), run).gains == {}
    other = shutil.copytree(run, run.parent / "other")
    rewrite(other, lambda records: [r for r in records if (r["kind"], r["step"]) != ("eval", 4)])
    found = write_comparison({"full": run, "other": other}, run.parent / "compare.html")
    assert found.verdicts == [] and found.problems == ["other has no evaluation with the settings of its run file yet"]


def test_less_drift_is_better(run: Path) -> None:
    for step, level in ((2, 0.5), (4, 0.1)):
        file = run / "evaluations" / f"step-00000{step}" / "rows.jsonl"
        file.write_text("".join(json.dumps({"example": i, "index": 0, "outside_l1": level}) + "\n" for i in range(6)))
    keep = ("step", "kind", "moment", "examples", "images", "outside_l1")
    rewrite(run, lambda records: [{k: r[k] for k in keep} if r["kind"] == "eval" else r for r in records])
    assert "Better: from warmed up" in report(run)


def test_what_ocr_read_stands_beside_its_image(run: Path) -> None:
    """And as a table where a run kept no images."""
    for step, read in ((0, "MCCN"), (2, "MOCN"), (4, "MOON")):
        folder = run / "evaluations" / f"step-00000{step}"
        row = {"example": 7, "index": 0, "text": "MOON", "read": read, "preservation": step / 8, "prompt": "A sign"}
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    page = report(run)
    shown = page.data["gallery"]
    assert shown["items"] == [{"example": 7, "index": 0, "text": "MOON", "prompt": "A sign"}]
    assert [variant["label"] for variant in shown["variants"]] == ["step 0", "step 2", "step 4"]
    assert [cells[0]["read"] for cells in shown["cells"]] == ["MCCN", "MOCN", "MOON"]
    measure = [one["name"] for one in shown["measures"]].index("preservation")
    assert [cells[0]["v"][measure] for cells in shown["cells"]] == [0.0, 0.25, 0.5]
    stored = [(run / f"evaluations/step-00000{step}/00000.png").read_bytes() for step in (0, 2, 4)]
    assert [base64.b64decode(page.images[cells[0]["i"]].partition("base64,")[2]) for cells in shown["cells"]] == stored
    for file in run.glob("evaluations/*/*.png"):
        file.unlink()
    page = report(run)
    assert page.data["gallery"]["items"] == [] and "Texts that OCR read in 1 images" in page
    assert "MOON MCCN MOCN MOON" in page


def test_files_without_a_record_are_not_shown(run: Path) -> None:
    """A run that was killed and went on from an earlier checkpoint has left them; a file is no folder of images."""
    before = report(run)
    shutil.copytree(run / "evaluations/step-000004", run / "evaluations/step-000009")
    shutil.copytree(run / "images/step-000004", run / "images/step-000009")
    for place in ("evaluation.png", "rollouts.png"):
        Image.new("RGB", (1, 1)).save(run / "images/step-000009" / place)
    (run / "evaluations/step-000003").write_text("")
    rewrite(run, lambda records: [*records, {"step": 3, "kind": "eval", "moment": "step", "images": 1}])
    rewrite(run, lambda records: sorted(records, key=lambda record: record["step"]))
    after = report(run)
    assert (after.images, after.fetched) == (before.images, before.fetched)


def test_large_images_lie_beside_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are compressed before; in a single file they are whole."""
    whole = report(run).images
    monkeypatch.setattr("retouch.observe.gallery.MOST_INSIDE", 1)
    assert {image.partition("/step")[0] for image in report(run).images} == {"evaluations"}
    assert all((run / image).read_bytes().startswith(b"\x89PNG") for image in report(run).images)
    assert Page(write_report(run, single_file=True).read_text()).images == whole
    monkeypatch.setattr(
        "retouch.observe.gallery.MOST_INSIDE", sum(f.stat().st_size for f in run.glob("evaluations/*/*.png")) - 1
    )
    page = report(run)
    assert all(image.startswith("data:image/webp;base64,") for image in page.images)
    assert "Compressed with losses" in page.data["gallery"]["note"]


@pytest.mark.parametrize("keep", [8, 40, -40])
def test_a_damaged_image_costs_no_other(run: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """A run that is killed, or a full disk, may leave one; compressing it ended the report of a larger run."""
    images = sorted(run.glob("evaluations/*/*.png"))
    images[0].write_bytes(images[0].read_bytes()[:keep])
    monkeypatch.setattr("retouch.observe.gallery.MOST_INSIDE", sum(file.stat().st_size for file in images) - 1)
    page = report(run)
    shown = [cell for cells in page.data["gallery"]["cells"] for cell in cells if cell]
    assert len(shown) == len(images) - 1
    assert all(page.images[cell["i"]].startswith("data:image/") for cell in shown)


def test_a_link_in_place_of_an_image_is_not_followed(run: Path, tmp_path: Path) -> None:
    """A run directory may come from anybody: no other file of this machine gets into a page."""
    secret = tmp_path / "secret.png"
    Image.new("RGB", (1, 1)).save(secret)
    for place in ("evaluations/step-000004/00000.png", "images/step-000004/evaluation.png"):
        (run / place).unlink()
        (run / place).symlink_to(secret)
    (run / "evaluations/step-000002/00000.png").write_text("not a PNG")
    before = report(run)
    held = base64.b64encode(secret.read_bytes()).decode()
    assert held not in (run / "report.html").read_text() and len(before.images) == 1  # of step 0


def test_evaluations_that_are_a_link_are_named(run: Path, tmp_path: Path) -> None:
    """Such as one to a larger disk: the page tells why it has no images, and so does a comparison."""
    shutil.move(run / "evaluations", tmp_path / "disk")
    (run / "evaluations").symlink_to(tmp_path / "disk")
    told = "evaluations/ is a link, which no page follows because it may lead anywhere; link the run directory instead"
    assert f"No images and no intervals of the evaluations: {told}." in report(run)
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    page = write_comparison({"a": run, "b": other}, tmp_path / "compare.html").path
    assert f"No samples of a: {told}." in Page(page.read_text(encoding="utf-8"))


def test_rewards_are_trained_where_rollouts_or_steps_log_them() -> None:
    """A supervised warm-up logs none; TRL's trainer logs them with its steps, and has no rollouts."""
    steps = {"rollout": [], "train": [{"step": 1, "loss": 0.5}]}
    assert not _has_trained({"last": {}}, steps)
    assert _has_trained({"last": {}}, {**steps, "train": [{"step": 1, "loss": 0.5, "reward": 0.1}]})
    assert _has_trained({"last": {}}, {**steps, "rollout": [{"step": 1}]})
    assert not _has_trained({"base": {}}, {**steps, "rollout": [{"step": 1}]})


def test_nothing_behind_a_link_is_shown(run: Path, tmp_path: Path) -> None:
    """Also where a folder is the link; a run directory that is one itself is as good as any."""
    (tmp_path / "linked").symlink_to(run)
    assert report(tmp_path / "linked").images == report(run).images != []
    secret = shutil.copytree(run / "evaluations/step-000004", tmp_path / "secret")
    (secret / "private.json").write_text('{"password": "of-another"}')
    image = secret / "00000.png"
    Image.new("RGB", (3, 3)).save(image)
    (secret / "rows.jsonl").write_text(json.dumps({"example": 0, "index": 0, "text": "of-another", "ocr.ned": 1.0}))
    shutil.rmtree(run / "evaluations/step-000004")
    (run / "evaluations/step-000004").symlink_to(secret)
    (run / "environment.json").unlink()
    (run / "environment.json").symlink_to(secret / "private.json")
    page = report(run)
    assert "of-another" not in (run / "report.html").read_text() and "not readable: no file of the run itself" in page
    assert image_inside(image.read_bytes()) not in page.images and len(page.images) == 2
    assert shown_file(run, "evaluations/step-000002/00000.png") is not None
    assert shown_file(run, "evaluations/step-000004/00000.png") is None
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    write_comparison({"a": run, "b": other}, tmp_path / "compare.html")
    assert "of-another" not in (tmp_path / "compare.html").read_text()
    (run / "config.yaml").rename(secret / "config.yaml")
    (run / "config.yaml").symlink_to(secret / "config.yaml")
    with pytest.raises(ConfigError, match="which is a link to"):
        report(run)


def test_words_from_data_are_never_markup(run: Path) -> None:
    attack = "<script>alert(1)</script><img src=http://x>"
    rows = [{"example": i, "index": 0, "text": attack, "read": attack, attack: 1.0} for i in range(2)]
    (run / "evaluations" / "step-000004" / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("The text is '{text}'.", f"{attack} {{text}}"))
    rewrite(run, lambda records: [{**r, attack: 1.0} if r["kind"] == "eval" else r for r in records])
    rewrite(run, lambda records: [*records, {"step": 4, "kind": "event", "event": "stopped", "reason": attack}])
    page = report(run)
    assert page.tags.count("script") == SCRIPTS
    assert all(value.startswith("data:") for value in page.fetched)
    assert f"Stopped step 4 of 4: {attack}" in page
    assert page.curve(f"eval/{attack}")["lines"][0]["y"] == [1.0] * 3
    assert page.data["gallery"]["items"][-1]["text"] == attack


# --- runs that did not end well ---


def test_a_run_that_is_still_going_or_was_killed(run: Path) -> None:
    rewrite(run, lambda records: records[:-1])
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "kind": "tra')
    assert "Killed step 4 of 4: no process holds the run any more" in report(run)
    assert "metrics.jsonl changed 2" in report(run) and "Last record" not in report(run)  # copies have it anew
    assert f"Continue it: retouch train {run}/config.yaml resume=auto" in report(run)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["processes"] == 1
    (run / "environment.json").write_text(json.dumps({**environment, "processes": 4}))
    told = f"Continue it under its launcher, on 4 processes: -m retouch train {run}/config.yaml resume=auto"
    assert told in report(run)
    lock = RunLock(run)
    lock.take()
    try:
        assert "Running step 4 of 4 when this page was written" in report(run)
    finally:
        lock.release()
    (run / ".lock").write_text("7\nanother-host\n")
    assert "No end recorded step 4 of 4: it ran on another machine" in report(run)
    assert "Continue it" not in report(run)
    (run / ".lock").write_text("7\n")  # of an earlier version; a copy of a run has no lock at all
    page = report(run)
    assert "No end recorded step 4 of 4: the machine that it ran on is not recorded" in page
    assert "Continue it" not in page and "it ran on another machine" not in page


def test_a_run_that_was_stopped_and_goes_on(run: Path) -> None:
    """What counts is the last record, not the last event."""
    stopped = {"step": 2, "kind": "event", "event": "stopped", "reason": "received SIGTERM"}
    rewrite(run, lambda records: [*records[:4], stopped])
    assert "Stopped step 2 of 4: received SIGTERM" in report(run)
    lock = RunLock(run)
    lock.take()
    here = (run / ".lock").read_text()
    try:
        assert "Stopped step 2 of 4: received SIGTERM" in report(run)  # of this process, before it ends
        (run / ".lock").write_text(f"{os.getpid()}\nanother-host\n")  # resumed in a container, where it has this pid
        assert "Running step 2 of 4" in report(run)
    finally:
        (run / ".lock").write_text(here)
        lock.release()
    rewrite(run, lambda records: [*records, {"step": 3, "kind": "train", "phase": "rl", "time": {"step": 1.0}}])
    assert "Killed step 3 of 4" in report(run)


def test_a_run_that_was_killed_in_its_first_step(run: Path) -> None:
    rewrite(run, lambda records: records[:1])
    shutil.rmtree(run / "images")
    (run / "environment.json").unlink()
    page = report(run)
    assert "No evaluation to compare yet." in page
    assert "base (step 0)" in page


def test_an_empty_run(run: Path) -> None:
    for name in ("images", "evaluations"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").write_text("")
    page = report(run)
    assert "0 optimizer steps" in page and "No evaluation to compare yet." in page
    (run / "metrics.jsonl").unlink()
    report(run)


def test_a_run_whose_rewards_failed(run: Path) -> None:
    """Failed rewards are null in rows and leave no mean."""

    def without_rewards(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        dropped = ("preservation", "preservation.outside_l1", "combined_score", "reward/preservation")
        return [{k: v for k, v in r.items() if k not in dropped} | {"grad_norm": None} for r in records]

    rewrite(run, without_rewards)
    rows = [{"example": 200, "index": 0, "text": None, "preservation": None}]
    (run / "evaluations" / "step-000004" / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "Finished step 4 of 4" in report(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b""),
        ("config.yaml", b"[1, 2"),
        ("config.yaml", b"\xff\xfe"),
        ("config.yaml", b"a: " + b"[" * 5000),
        ("config.yaml", b"name: x\nmodel: 5\n"),
        ("metrics.jsonl", b'{"kind": "train", "step": 1}\n'),
        ("metrics.jsonl", b'{"kind": "eval", "step": 1, "moment": 5}\n{"kind": "train", "step": 2, "time": 5}\n'),
    ],
)
def test_files_that_are_not_of_a_run(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    for command in (["report", run], ["compare", run, shutil.copytree(run, run.parent / "copy")]):
        outcome = retouch(*command)
        assert outcome.code == 2 and outcome.err.startswith("error: "), outcome.err


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b'"\\ud800"'])
def test_an_environment_that_cannot_be_read_is_said(run: Path, content: bytes) -> None:
    (run / "environment.json").write_bytes(content)
    assert "not readable: " in report(run)


def test_lines_of_metrics_that_are_no_records_are_skipped(run: Path) -> None:
    os.utime(run / "metrics.jsonl", (0, 0))  # the page has the time of the last record
    before = report(run).text
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(b'[]\n5\nnull\n\xff\n{"kind": ["a"], "step": 1}\n{"kind": "eval", "step": "x"}\n{"kind": "tra')
    os.utime(run / "metrics.jsonl", (0, 0))
    assert report(run).text == before


def test_the_command(run: Path, tmp_path: Path) -> None:
    outcome = retouch("report", run)
    assert (outcome.code, outcome.out) == (0, f"{run}/report.html\n")
    outcome = retouch("report", tmp_path)
    assert (outcome.code, outcome.err) == (
        2,
        f"error: {tmp_path} is not a run directory (no config.yaml); give a folder that `retouch train` wrote\n",
    )


def test_milestones() -> None:
    moments = ["start", "step", "warmup", "step", "end"]
    records = [{"moment": moment, "step": step} for step, moment in enumerate(moments)]
    assert {name: r["step"] for name, r in milestones(records).items()} == {"base": 0, "warmed up": 2, "last": 4}
    assert {name: r["step"] for name, r in milestones(records[:2]).items()} == {"base": 0, "last": 1}
    assert list(milestones(records[:1])) == ["base"]
    assert milestones([]) == {}
