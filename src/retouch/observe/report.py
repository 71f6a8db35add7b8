"""RUN/report.html: one file that shows a run without a network or a server.

Everything comes from the run directory: verdict and before/after grid from the evaluations, curves from metrics.jsonl,
time and cost of steps, the run file, the versions.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retouch.errors import RetouchError
from retouch.files import plain_json
from retouch.files.disk import write_whole
from retouch.observe.cost import COUNTED
from retouch.observe.html import (
    COLOURS,
    Markup,
    document,
    escape,
    image_tag,
    interval,
    marked,
    number,
    section,
    svg_curve,
    table,
    verdict,
)
from retouch.observe.run_dir import read_config, read_metrics, read_rows, reading_records
from retouch.observe.statistics import MIN_EXAMPLES, paired_difference
from retouch.observe.timing import PARTS
from retouch.observe.transfer import Transfer, shown_interval, transfers

Record = dict[str, Any]

Change = Callable[[str], tuple[float, float, float] | None]
"""Measure -> its paired difference and 95 % interval."""

logger = logging.getLogger(__name__)

_HEADLINE = ("ocr.ned", "ocr.exact", "glyph_correlation")
_DRIFT = "outside_l1"
"""Measures of a verdict, if the run has them; the first one is judged. Less drift is better, more of the others."""

_CLEAR = 0.0005
"""Smallest difference that a verdict calls better or worse: less is shown as 0.000."""

_SHOWN_READINGS = 24

_CURVES = {
    "rollout": ("combined_score", "reward/*", "combined_std", "zero_std_groups", "failed"),
    "train": ("loss", "error", "grad_norm", "max_abs_log_ratio", "clip_fraction", "approx_kl", "kl", "lr"),
}
"""Curves by kind of record; those of evaluations are all their measures."""


def leave_report(run: Path) -> None:
    """`write_report` at the end of a run; a failure is logged and does not fail the run."""
    try:
        write_report(run)
    except (RetouchError, OSError) as error:  # such as a run directory that was deleted
        logger.error("no report of %s: %s", run, error)
    except Exception:
        logger.exception("no report of %s; write it with `retouch report`", run)


def write_report(run: Path) -> Path:
    """Write RUN/report.html -> its path.

    Raises:
        ConfigError: not a run directory, or files that are not of a run.
    """
    with reading_records(run):
        return _write(run)


def _write(run: Path) -> Path:
    config = read_config(run)
    records = read_metrics(run / "metrics.jsonl")
    by_kind = records_by_kind(records)
    timed = by_kind["train"] + [record for record in by_kind["eval"] if "time" in record]
    points = milestones(by_kind["eval"])
    rows = {name: rows_of(run, record) for name, record in points.items()}
    body = (
        f"<p class=dim>{escape(subtitle(config, by_kind))}</p>",
        _verdict(points, rows, list(config.get("rewards") or {}), records),
        _evaluations(points, rows),
        _transfer_section(
            list(rows.values())[-2:] if _has_trained(points, by_kind) else [], config.get("rewards") or {}
        ),
        _grids(run, read=any("read" in row for part in rows.values() for row in part)),
        _readings(rows),
        curves([by_kind]),
        _time_split(timed),
        _costs(by_kind["train"], timed),
        _details(run),
    )
    path = run / "report.html"
    write_whole(path, document(config["name"], body))
    return path


def records_by_kind(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of a metrics.jsonl as train, rollout, eval and event."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    return by_kind


def milestones(evaluations: Sequence[Record]) -> dict[str, Record]:
    """The evaluations that a verdict compares: base, warmed up (after a supervised warm-up), last."""
    found: dict[str, Record] = {}
    for record in evaluations:
        if record["moment"] == "start":
            found["base"] = record
        elif record["moment"] == "warmup":
            found["warmed up"] = record
    if evaluations and evaluations[-1] not in found.values():
        found["last"] = evaluations[-1]
    return found


def subtitle(config: Record, by_kind: dict[str, list[Record]]) -> str:
    model, steps = config["model"], len(by_kind["train"])
    seconds = sum(r["time"]["step"] for r in by_kind["train"])
    return (
        f"{model['family']} ({model['train']['kind']}), {config['algorithm']['name']}, {steps} optimizer steps in "
        f"{seconds / 60:.1f} minutes, seed {config['seed']}"
    )


def _verdict(
    points: dict[str, Record], rows: dict[str, list[Record]], rewards: Sequence[str], records: Sequence[Record]
) -> str:
    ended = _ended(records)
    if len(points) < 2:
        return verdict(f"No evaluation to compare yet. {ended}")
    before_name, last_name = list(points)[-2:]
    before, last = points[before_name], points[last_name]
    word, parts = judgement(before, last, rows[before_name], rows[last_name], rewards)
    which = "held-out" if last["examples"] == "held_out" else "training"
    return verdict(
        f": from {before_name} (step {before['step']}) to step {last['step']}, on {last['images']} {which} images: "
        f"{'; '.join(parts)}. {ended}",
        word,
    )


def judgement(
    before: Record, after: Record, before_rows: Sequence[Record], after_rows: Sequence[Record], rewards: Sequence[str]
) -> tuple[str, list[str]]:
    """Compare two evaluations: "better", "worse" or "no clear change" by the first measure that both have (text
    accuracy, then the rewards, then drift), and every such measure with its paired difference."""
    judged = [m for m in (*_HEADLINE, *rewards, _DRIFT) if is_number(after.get(m)) and is_number(before.get(m))]
    changes = {m: change_of(before_rows, after_rows, m) for m in judged}
    parts = [f"{m} {before[m]:.3f} → {after[m]:.3f} ({interval(changes[m]) or 'no interval'})" for m in judged]
    if not judged:
        return "nothing to judge", parts
    examples = len(set(_pairs(before_rows, after_rows, judged[0])[0]))
    if examples < MIN_EXAMPLES:
        return f"not judged: {examples} examples, and a verdict needs {MIN_EXAMPLES}", parts
    return _word(judged[0], changes[judged[0]]), parts


def _word(measure: str, change: tuple[float, float, float] | None) -> str:
    """By the 95 % interval: all of it must be a difference that is shown."""
    if change is None:
        return "not judged"
    low, high = (-change[2], -change[1]) if measure == _DRIFT else change[1:]
    return "better" if low >= _CLEAR else "worse" if high <= -_CLEAR else "no clear change"


def _ended(records: Sequence[Record]) -> str:
    last = next((record for record in reversed(records) if record.get("event") != "alarm"), {})
    if last.get("kind") != "event":
        return "The run has not ended: it is running, or was killed."
    return f"The run {last['event']}{': ' + last['reason'] if 'reason' in last else ''}."


def _evaluations(points: dict[str, Record], rows: dict[str, list[Record]]) -> str:
    columns = {f"{name} (step {record['step']})": record for name, record in points.items()}
    changes: dict[str, Change] = {}
    if len(points) > 1:
        before, after = list(points)[-2:]
        changes[f"{after} − {before}"] = lambda measure: change_of(rows[before], rows[after], measure)
    return evaluation_table(columns, changes, "one kind of weights; differences are paired by image.")


def _has_trained(points: Mapping[str, Record], by_kind: Mapping[str, Sequence[Record]]) -> bool:
    """Whether rewards were optimized between the last two evaluations: a supervised warm-up reads no rewards."""
    return "last" in points and bool(by_kind["rollout"])


def _transfer_section(rows: Sequence[Sequence[Record]], rewards: Mapping[str, Record]) -> str:
    """The part of the gain of each trained reader that gold readers confirm; "" without a clear gain."""
    if len(rows) != 2:
        return ""
    gold = [name for name, entry in rewards.items() if entry.get("role") == "gold"]
    trained = [name for name, entry in rewards.items() if name not in gold and _is_optimized(entry)]
    note = (
        "Share of the gain of the reward that was trained on, as readers measure it that were not: 1 is all of it. The "
        "hacking index is that gain less the mean gain of the others."
    )
    tables = "".join(_transfer_table(one) for one in transfers(rows[0], rows[1], trained, gold))
    return section("Transfer to other readers", tables, note) if tables else ""


def _is_optimized(entry: Record) -> bool:
    return bool(entry.get("weight", 1.0) or entry.get("gradient_weight", 0.0))


def _transfer_table(found: Transfer) -> str:
    lines = [[f"{found.trained} (trained)", shown_interval(found.gain), "–"]]
    lines += [[name, shown_interval(found.gains[name]), shown_interval(s, ".2f")] for name, s in found.shares.items()]
    lines.append(["hacking index", shown_interval(found.index), "–"])
    return table(["reader", "gain of NED [95 %]", "transfer [95 %]"], lines)


def evaluation_table(columns: Mapping[str, Record], changes: Mapping[str, Change], note: str) -> str:
    """Measures by evaluation, then differences by title with their 95 % intervals."""
    lines = [
        [m, *(number(c.get(m)) for c in columns.values()), *(interval(of(m)) or "–" for of in changes.values())]
        for m in measures_of(list(columns.values()))
    ]
    head = ["", *columns, *(f"{title} [95 %]" for title in changes)]
    return section("Evaluation", table(head, lines), f"Fixed seeds, plain ODE; {note}")


def rows_of(run: Path, evaluation: Record) -> list[Record]:
    """The measures of each image of an evaluation."""
    return read_rows(run / "evaluations" / f"step-{evaluation['step']:06d}" / "rows.jsonl")


def change_of(before: Sequence[Record], after: Sequence[Record], measure: str) -> tuple[float, float, float] | None:
    """Paired difference over the images that both evaluations measured, with its interval over their examples; None
    for fewer than two examples."""
    examples, new, old = _pairs(before, after, measure)
    return paired_difference(new, old, examples) if len(set(examples)) > 1 else None


def _pairs(
    before: Sequence[Record], after: Sequence[Record], measure: str
) -> tuple[list[Any], list[float], list[float]]:
    """Examples, values after and values before of the images that both evaluations measured."""
    earlier = {(r["example"], r["index"]): r.get(measure) for r in before}
    pairs = [(r["example"], r.get(measure), earlier.get((r["example"], r["index"]))) for r in after]
    valid = [(example, float(a), float(b)) for example, a, b in pairs if is_number(a) and is_number(b)]  # type: ignore[arg-type]
    return [e for e, _, _ in valid], [a for _, a, _ in valid], [b for _, _, b in valid]


def _readings(rows: dict[str, list[Record]]) -> str:
    """The OCR texts as a table that can be searched."""
    read = {name: {(r["example"], r["index"]): r for r in part} for name, part in rows.items()}
    keys = [key for key, r in next(reversed(read.values()), {}).items() if "read" in r][:_SHOWN_READINGS]
    found = [[part.get(key, {}) for part in read.values()] for key in keys]
    shown = table(["target text", *read], ([of[-1].get("text"), *(r.get("read", "–") for r in of)] for of in found))
    return f"<details><summary>What OCR read: the first {len(keys)} images</summary>{shown}</details>" if keys else ""


def _grids(run: Path, *, read: bool) -> str:
    """The newest grids of an evaluation and of rollouts.

    Args:
        read: a reward read the text in the images.
    """
    grids = {name: sorted((run / "images").glob(f"step-*/{name}.png"))[-1:] for name in ("evaluation", "rollouts")}
    shown = {name: "".join(image_tag(name, file) for file in files) for name, files in grids.items()}
    return section(
        "Before and after", shown["evaluation"], "Under each image: the text that OCR read." if read else ""
    ) + section("Rollouts", shown["rollouts"], "Groups of one example with their rewards; the last ones saved.")


def curves(runs: Sequence[dict[str, list[Record]]]) -> str:
    """Every metric over the steps, with a line for each run (its `records_by_kind`)."""
    plots: list[str] = []
    for kind in ("eval", "rollout", "train"):
        measured = measures_of([record for run in runs for record in run[kind]])
        rewards = [name for name in measured if name.startswith("reward/")]
        names = [one for name in _CURVES.get(kind, measured) for one in (rewards if name == "reward/*" else [name])]
        for name in names:
            lines = [[(r["step"], float(r[name])) for r in run[kind] if is_number(r.get(name))] for run in runs]
            if any(lines):
                plots.append(f"<figure>{svg_curve(*lines)}<figcaption>{kind}: {escape(name)}</figcaption></figure>")
    return section("Curves", f"<div class=plots>{''.join(plots)}</div>" if plots else "")


def _time_split(timed: Sequence[Record]) -> str:
    whole = sum(r["time"]["step"] for r in timed)
    if whole <= 0:
        return ""
    totals = {part: sum(r["time"].get(part, 0.0) for r in timed) for part in PARTS}
    coloured = [(part, seconds, colour) for (part, seconds), colour in zip(totals.items(), COLOURS, strict=True)]
    bar = "".join(
        f"<span style='width:{100 * seconds / whole:.2f}%;background:{colour}' title='{part}'></span>"
        for part, seconds, colour in coloured
    )
    rows: list[tuple[object, ...]] = [
        (marked(colour, part), f"{seconds:.1f}", f"{100 * seconds / whole:.1f} %")
        for part, seconds, colour in coloured
        if seconds > 0
    ]
    rows.append((Markup("<b>all</b>"), f"{sum(totals.values()):.1f}", f"of {whole:.1f} s of steps and evaluations"))
    return section("Where the time went", f"<div class=bar>{bar}</div>" + table(["", "seconds", ""], rows))


def _costs(train: Sequence[Record], timed: Sequence[Record]) -> str:
    """The network's work on the first process; rates are those of training steps.

    Args:
        timed: training steps and evaluations.
    """
    times = [r["time"] for r in train]
    whole = sum(t["step"] for t in times)

    def mean(name: str) -> float:
        return sum(t.get(name, 0.0) * t["step"] for t in times) / whole if whole > 0 else 0.0

    rows: dict[str, float] = {
        f"forward-equivalents, {part}": sum(r["time"].get(f"nfe_{part}", 0.0) for r in timed) for part in COUNTED
    }
    images = sum(t.get("images", 0.0) for t in times)
    trained = sum(rows.values()) - rows["forward-equivalents, eval"]
    rows |= {
        "forward-equivalents for each image": trained / images if images else 0.0,
        "images": images,
        "images a second": images / whole if whole > 0 else 0.0,
        "peak of GPU memory, GiB": max((t.get("peak_memory_gib", 0.0) for t in times), default=0.0),
        "TFLOP/s": mean("tflops"),
        "share of peak FLOP/s": mean("mfu"),
    }
    return section("Compute", table(["", ""], ((n, f"{v:,.4g}") for n, v in rows.items() if v)))


def _details(run: Path) -> str:
    shown = f"<pre>{escape((run / 'config.yaml').read_text(encoding='utf-8'))}</pre>"
    environment = run / "environment.json"
    versions = ""
    if environment.is_file():
        try:
            text = json.dumps(plain_json.loads(environment.read_bytes()), indent=2)
        except ValueError as error:
            text = f"not readable: {error}"
        versions = f"<pre>{escape(text)}</pre>"
    return section("Run file", shown) + section("Environment", versions)


def measures_of(records: Sequence[Record]) -> list[str]:
    """Names of the numbers in records, without counters."""
    skipped = {"step", "images", "epoch"}
    return list(dict.fromkeys(n for r in records for n, v in r.items() if is_number(v) and n not in skipped))


def is_number(value: object) -> bool:
    return isinstance(value, int | float)
