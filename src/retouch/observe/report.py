"""The page about a run, RUN/report.html, which needs neither a network nor a server; `retouch watch` serves the same.

Everything comes from the run directory: status from its lock and last record, verdict and gallery from the evaluations,
curves from metrics.jsonl, time and cost of steps, the run file, the versions.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from retouch.errors import RetouchError
from retouch.files import plain_json
from retouch.files.disk import is_own, write_whole
from retouch.observe.charts import charts_of, is_number, measures_of
from retouch.observe.cost import COUNTED
from retouch.observe.gallery import gallery, image_inside, linked_away, shown_file, stored_of
from retouch.observe.kept import steps_kept
from retouch.observe.measures import DRIFT, SECTIONS, judged
from retouch.observe.page import Block, Markup, Page, PageTable, document, part, table
from retouch.observe.run_dir import MOST_TEXT, read_config, read_metrics, reading_records, require_own, rows_of
from retouch.observe.settings import alike
from retouch.observe.statistics import MIN_EXAMPLES, paired_difference
from retouch.observe.status import status_of
from retouch.observe.timing import PARTS
from retouch.observe.transfer import Transfer, shown_interval, transfers
from retouch.process.plain_text import count_of

Record = dict[str, Any]

Change = Callable[[str], tuple[float, float, float] | None]
"""Measure -> its paired difference and 95 % interval."""

logger = logging.getLogger(__name__)

_CLEAR = 0.0005
"""Smallest difference that a verdict calls better or worse: less is shown as 0.000."""

TONES = ("better", "worse")
"""Words of a verdict that are the class of its colour, too."""


def leave_report(run: Path) -> None:
    """`write_report` at the end of a run; a failure is logged and does not fail the run."""
    try:
        write_report(run)
    except (RetouchError, OSError) as error:  # such as a run directory that was deleted
        logger.error("no report of %s: %s", run, error)
    except Exception:
        logger.exception("no report of %s; write it with `retouch report`", run)


def write_report(run: Path, single_file: bool = False) -> Path:
    """Write RUN/report.html -> its path.

    Args:
        single_file: keep images inside the file, however large it gets.

    Raises:
        ConfigError: not a run directory, or files that are not of a run.
    """
    path = run / "report.html"
    with reading_records(run):
        write_whole(path, document(page_of(run, inside=True if single_file else None, live=False)))
    return path


def page_of(run: Path, *, inside: bool | None, live: bool) -> Page:
    """The page about a run as it is now.

    Args:
        inside: whether images are inside the page, or the files of the run; None: inside while they are small enough.
        live: the page is kept up to date.

    Raises:
        ConfigError: not a run directory.
    """
    require_own(run)
    config = read_config(run)
    records = read_metrics(run / "metrics.jsonl")
    by_kind = records_by_kind(records)
    rewards = config.get("rewards") or {}
    timed = by_kind["train"] + [record for record in by_kind["eval"] if "time" in record]
    compared = alike(run, by_kind["eval"])
    points = milestones(compared)
    rows = {name: rows_of(run, record) for name, record in points.items()}
    stored = stored_of(run, {record["step"] for record in by_kind["eval"]})
    images = gallery(stored, run / "report.html", _gallery_measures(points, rewards), inside=inside)
    last_two = list(rows.values())[-2:] if _has_trained(points, by_kind) else []
    return Page(
        str(config["name"]),
        [
            Block("html", "subtitle", part("line", subtitle(config, by_kind))),
            Block("html", "status", part("status", status_of(run, config, records, live=live))),
            Block("html", "verdict", _verdict(points, rows, list(rewards)) + _left_out(run, by_kind["eval"], compared)),
            Block("tools"),
            *(Block("charts", key, title=SECTIONS[key]) for key in ("reward", "measures")),
            Block("html", "evaluation", _evaluations(points, rows) + _transfer_section(last_two, rewards)),
            Block("gallery"),
            Block("html", "readings", "" if images.images else _readings(rows)),
            *(Block("charts", key, title=SECTIONS[key]) for key in ("loss", "ratio", "kl", "gradient")),
            Block("charts", "rest", title=SECTIONS["rest"], folded=True),
            Block("html", "grids", _grids(run, by_kind, inside=not images.beside and inside is not False)),
            Block("html", "time", _time_split(timed)),
            Block("html", "costs", _costs(by_kind["train"], timed)),
            Block("html", "details", _details(run)),
        ],
        {
            "lines": [{"name": str(config["name"]), "letter": "", "about": ""}],
            "charts": charts_of([[by_kind]], rewards),
            "gallery": images.data,
        },
        images.images,
        images.beside or inside is False,
    )


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


def _verdict(points: dict[str, Record], rows: dict[str, list[Record]], rewards: Sequence[str]) -> Markup:
    if len(points) < 2:
        return part("verdict", Verdict("", "No evaluation to compare yet."))
    before_name, last_name = list(points)[-2:]
    before, last = points[before_name], points[last_name]
    word, parts = judgement(before, last, rows[before_name], rows[last_name], rewards)
    which = "held-out" if last["examples"] == "held_out" else "training"
    images = count_of(last["images"], f"{which} image")
    text = f"from {before_name} (step {before['step']}) to step {last['step']}, on {images}: {'; '.join(parts)}."
    return part("verdict", Verdict(f"{word[:1].upper()}{word[1:]}:", text, word * (word in TONES)))


def _left_out(run: Path, evaluations: Sequence[Record], compared: Sequence[Record]) -> Markup:
    """One sentence on evaluations of other settings than today's or of other examples, and one on linked ones."""
    lines = Markup()
    if len(compared) < len(evaluations):
        step = max(record["step"] for record in evaluations if record not in compared)
        lines += part(
            "line",
            f"Evaluations up to step {step} were sampled or scored with other settings than the run file has now, or "
            "have no example in common with the last one: verdict, table and transfer leave them out.",
        )
    if problem := linked_away(run):
        lines += part("line", f"No images and no intervals of the evaluations: {problem}.")
    return Markup(lines)


@dataclass(frozen=True)
class Verdict:
    """A marked paragraph: a word in bold, and a text.

    Attributes:
        tone: better, worse or warning, which have colours.
    """

    word: str
    text: str
    tone: str = ""


def judgement(
    before: Record, after: Record, before_rows: Sequence[Record], after_rows: Sequence[Record], rewards: Sequence[str]
) -> tuple[str, list[str]]:
    """Compare two evaluations: "better", "worse" or "no clear change" by the first measure that both have (text
    accuracy, then the rewards, then drift), and every such measure with its paired difference."""
    both = [m for m in judged(rewards) if is_number(after.get(m)) and is_number(before.get(m))]
    changes = {m: change_of(before_rows, after_rows, m) for m in both}
    parts = [f"{m} {before[m]:.3f} → {after[m]:.3f} ({interval_text(changes[m]) or 'no interval'})" for m in both]
    if not both:
        return "nothing to judge", parts
    examples = len(set(paired_values(before_rows, after_rows, both[0])[0]))
    if examples < MIN_EXAMPLES:
        return f"not judged: {examples} examples, and a verdict needs {MIN_EXAMPLES}", parts
    return _word(both[0], changes[both[0]]), parts


def _word(measure: str, change: tuple[float, float, float] | None) -> str:
    """By the 95 % interval: all of it must be a difference that is shown."""
    if change is None:
        return "not judged"
    low, high = (-change[2], -change[1]) if measure == DRIFT else change[1:]
    return "better" if low >= _CLEAR else "worse" if high <= -_CLEAR else "no clear change"


def _evaluations(points: dict[str, Record], rows: dict[str, list[Record]]) -> Markup:
    columns = {f"{name} (step {record['step']})": record for name, record in points.items()}
    changes: dict[str, Change] = {}
    if len(points) > 1:
        before, after = list(points)[-2:]
        changes[f"{after} − {before}"] = lambda measure: change_of(rows[before], rows[after], measure)
    return evaluation_table(columns, changes, "one kind of weights; differences are paired by image.")


def _has_trained(points: Mapping[str, Record], by_kind: Mapping[str, Sequence[Record]]) -> bool:
    """Whether rewards were optimized between the last two evaluations: a supervised warm-up reads no rewards. TRL's
    trainer logs them with its steps."""
    return "last" in points and bool(by_kind["rollout"] or any("reward" in one for one in by_kind["train"]))


def _transfer_section(rows: Sequence[Sequence[Record]], rewards: Mapping[str, Record]) -> Markup:
    """The part of the gain of each trained reader that gold readers confirm; "" without a clear gain."""
    if len(rows) != 2:
        return Markup()
    gold = [name for name, entry in rewards.items() if entry.get("role") == "gold"]
    weights = {name: entry.get("weight", 1.0) or entry.get("gradient_weight", 0.0) for name, entry in rewards.items()}
    trained = [name for name, weight in weights.items() if name not in gold and weight]
    note = (
        "Share of the gain of the reward that was trained on, as readers measure it that were not: 1 is all of it. The "
        "hacking index is that gain less the mean gain of the others."
    )
    tables = Markup("".join(_transfer_table(one) for one in transfers(rows[0], rows[1], trained, gold)))
    return part("section", "Transfer to other readers", note, tables)


def _transfer_table(found: Transfer) -> Markup:
    lines = [[f"{found.trained} (trained)", shown_interval(found.gain), "–"]]
    lines += [[name, shown_interval(found.gains[name]), shown_interval(s, ".2f")] for name, s in found.shares.items()]
    lines.append(["hacking index", shown_interval(found.index), "–"])
    return table(PageTable(f"transfer-of-{found.trained}", ["reader", "gain of NED [95 %]", "transfer [95 %]"], lines))


def evaluation_table(columns: Mapping[str, Record], changes: Mapping[str, Change], note: str) -> Markup:
    """Measures by evaluation, then differences by title with their 95 % intervals."""
    lines = [
        [m, *(number(c.get(m)) for c in columns.values()), *(interval_text(of(m)) or "–" for of in changes.values())]
        for m in measures_of(list(columns.values()))
    ]
    head = ["", *columns, *(f"{title} [95 %]" for title in changes)]
    return part("section", "Evaluation", f"Fixed seeds, plain ODE; {note}", table(PageTable("evaluation", head, lines)))


def change_of(before: Sequence[Record], after: Sequence[Record], measure: str) -> tuple[float, float, float] | None:
    """Paired difference over the images that both evaluations measured, with its interval over their examples; None
    for fewer than two examples."""
    examples, new, old = paired_values(before, after, measure)
    return paired_difference(new, old, examples) if len(set(examples)) > 1 else None


def paired_values(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], measure: str
) -> tuple[list[Any], list[float], list[float]]:
    """Examples, values after and values before of the images that both evaluations measured."""
    earlier = {(r["example"], r["index"]): r.get(measure) for r in before}
    pairs = [(r["example"], r.get(measure), earlier.get((r["example"], r["index"]))) for r in after]
    valid = [(example, float(a), float(b)) for example, a, b in pairs if is_number(a) and is_number(b)]  # type: ignore[arg-type]
    return [e for e, _, _ in valid], [a for _, a, _ in valid], [b for _, _, b in valid]


def _gallery_measures(points: Mapping[str, Record], rewards: Mapping[str, Record]) -> list[str]:
    """Those of the evaluations: of a verdict, rewards, then drift, and their parts last."""
    named = measures_of(list(points.values()))
    first = [name for name in judged(rewards) if name in named]
    return list(dict.fromkeys([*first, *(name for name in named if not name.startswith("picture."))]))


def _readings(rows: dict[str, list[Record]]) -> Markup:
    """The OCR texts of a run that kept no images."""
    read = {name: {(r["example"], r["index"]): r for r in part} for name, part in rows.items()}
    keys = [key for key, r in next(reversed(read.values()), {}).items() if "read" in r]
    found = [[of.get(key, {}) for of in read.values()] for key in keys]
    lines = [[of[-1].get("text"), *(r.get("read", "–") for r in of)] for of in found]
    shown = table(PageTable("readings", ["target text", *read], lines, text=True))
    return part("folded", f"Texts that OCR read in {len(keys)} images", "", shown)


def _grids(run: Path, by_kind: Mapping[str, Sequence[Record]], *, inside: bool) -> Markup:
    """The newest grids of an evaluation and of rollouts, of steps with such records."""
    notes = {
        "evaluation": ("Grid of the last evaluation", "The masked input, and the first and the last evaluations."),
        "rollouts": ("Rollouts", "Groups of one example with their rewards; the last ones saved."),
    }
    kinds = {"evaluation": ("eval",), "rollouts": ("rollout", "train")}
    shown = Markup()
    for name, (title, note) in notes.items():
        steps = {record["step"] for kind in kinds[name] for record in by_kind.get(kind, ())}
        kept = [folder / f"{name}.png" for step, folder in steps_kept(run / "images").items() if step in steps]
        for file in [file for file in kept if file.is_file()][-1:]:
            place = file.relative_to(run).as_posix()
            if (image := shown_file(run, place)) is not None:
                source = image_inside(image) if inside else quote(place)
                shown += part("folded", title, note, part("image", name, source))
    return Markup(shown)


def _time_split(timed: Sequence[Record]) -> Markup:
    whole = sum(r["time"]["step"] for r in timed)
    if whole <= 0:
        return Markup()
    totals = {name: sum(r["time"].get(name, 0.0) for r in timed) for name in PARTS}
    bars: list[Record] = []
    rows: list[tuple[object, ...]] = []
    start = 0.0
    for colour, (name, seconds) in enumerate(totals.items()):
        bars.append({"colour": colour, "start": start, "width": 100 * seconds / whole, "name": name})
        start += 100 * seconds / whole
        if seconds > 0:
            rows.append((part("square", colour, name), f"{seconds:.1f}", f"{100 * seconds / whole:.1f} %"))
    rows.append(("all", f"{sum(totals.values()):.1f}", f"of {whole:.1f} s of steps and evaluations"))
    shown = Markup(part("bar", bars) + table(PageTable("time", ["", "seconds", ""], rows)))
    return part("folded", "Where the time went", "", shown)


def _costs(train: Sequence[Record], timed: Sequence[Record]) -> Markup:
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
    shown = table(PageTable("compute", ["", "value"], [(n, f"{v:,.4g}") for n, v in rows.items() if v]))
    return part("folded", "Compute", "", shown)


def _details(run: Path) -> Markup:
    shown = part("folded", "Run file", "", part("text", (run / "config.yaml").read_text(encoding="utf-8")))
    environment = run / "environment.json"
    if not environment.is_file():
        return shown
    try:
        if not is_own(run, environment, MOST_TEXT):
            raise ValueError("no file of the run itself, or too large")
        text = json.dumps(plain_json.loads(environment.read_bytes()), indent=2)
    except ValueError as error:
        text = f"not readable: {error}"
    return Markup(shown + part("folded", "Environment", "", part("text", text)))


def number(value: object) -> str:
    return f"{value:.4f}" if is_number(value) else "–"


def interval_text(change: tuple[float, float, float] | None) -> str:
    """A difference with its 95 % interval; "" for None."""
    return f"{change[0]:+.3f} [{change[1]:+.3f}, {change[2]:+.3f}]" if change else ""
