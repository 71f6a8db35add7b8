"""The pages of report, watch and compare in a headless Chromium: what is clicked, dragged and shown."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import threading
from pathlib import Path

import pytest
from benchmarks.report_pages import write_run

from retouch.observe.comparison import run_names, write_comparison
from retouch.observe.report import write_report
from retouch.observe.run_dir import read_metrics
from retouch.observe.run_lock import RunLock
from retouch.observe.watch import open_server
from tests.browser import Page

READY = "document.documentElement.dataset.ready && document.querySelectorAll('canvas').length > 1"


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of three learning rates and three seeds."""
    folder = tmp_path_factory.mktemp("nine")
    pairs = [(lr, seed) for lr in (3e-4, 1e-3, 3e-3) for seed in (0, 1, 2)]
    return [write_run(folder / f"lr{lr}-{s}", 20, 3, 4, seed=s, optimizer__lr=lr) for lr, s in pairs]


WHOLE = "[...document.querySelectorAll('.plot')].every(plot => plot.scrollWidth <= plot.clientWidth)"
"""No curve is wider than its place, which would hide its last steps."""


def opened(page: Page, file: Path) -> None:
    page.open(file)
    page.wait(READY)
    page.wait(WHOLE)


def test_a_report_is_zoomed_smoothed_and_its_gallery_browsed(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 80, 9, 6)
    attack = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    rows = run / "evaluations/step-000080/rows.jsonl"
    rows.write_text(rows.read_text().replace('"text": "SALE"', f'"text": {json.dumps(attack)}'))
    file = write_report(run)
    opened(page, file)
    chart = "[data-chart='rollout/combined_score']"
    assert page.run(f"document.querySelector(`{chart} output`).textContent").startswith("step 79: ")

    left, top, width, _ = page.box(f"{chart} .u-over")
    page.drag((left + 0.2 * width, top + 50), (left + 0.4 * width, top + 50), (left + 0.5 * width, top + 50))
    page.wait(f"document.querySelector(`{chart}`).hasAttribute('data-zoomed')")
    page.set("#smoothing", 0.9)
    page.wait(f"document.querySelector(`{chart} output`).textContent.endsWith('(smoothed)')")
    assert page.run(f"document.querySelector(`{chart}`).hasAttribute('data-zoomed')")
    page.click("#reset")
    page.wait(f"!document.querySelector(`{chart}`).hasAttribute('data-zoomed')")
    page.mouse("mouseMoved", page.box(f"{chart} .u-over")[:2], clicks=0)
    page.wait(f"document.querySelector(`{chart} output`).textContent.startsWith('step 1: ')")

    tile = "document.querySelector('.tile')"
    assert page.run("document.querySelectorAll('.tile').length") == 6
    assert page.run(f"{tile}.textContent").startswith(f"to write {attack}")
    page.set("[name=step]", 0)
    page.wait(f"{tile}.querySelectorAll('img').length == 1")  # the first evaluation, with nothing before it
    page.set("[name=step]", 4)
    page.wait(f"{tile}.querySelectorAll('img').length == 2")
    page.set("[name='wipe all']", 30)
    assert page.run(f"{tile}.querySelector('img + img').style.clipPath") == "inset(0px 0px 0px 30%)"
    values = "[...document.querySelectorAll('.tile')].map(t => Number(t.textContent.split(' ').at(-1)))"
    for sort, reverse in (("best", True), ("worst", False)):
        page.set("[name=sort]", sort)
        shown = page.wait(values)
        assert shown == sorted(shown, reverse=reverse), sort
    page.click(".tile .open")
    page.wait("document.querySelector('dialog').open && document.querySelector('dialog img').naturalWidth == 64")
    assert page.run("window.hacked") is None and page.requests == [file.as_uri()]


CATCH_FILES = (
    "HTMLAnchorElement.prototype.click = function () { "
    "window.saved = [this.download, decodeURIComponent(this.href).split(',').slice(1).join(',')]; };"
)
"""Keeps name and text of a file that a button saves."""


def test_commands_are_copied_and_tables_and_curves_saved(page: Page, tmp_path: Path) -> None:
    """On the page of a killed run, which has a command to continue it; its path needs quotes in a shell."""
    run = write_run(tmp_path / "it's here" / "run", 6, 3, 4, of=12)
    (lock := RunLock(run)).take()
    lock.release()
    opened(page, write_report(run))
    page.run(CATCH_FILES)
    command = f"retouch train {shlex.quote(str(run / 'config.yaml'))} resume=auto"
    label = "document.querySelector('[data-copy]').textContent"
    page.run("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async text => { copied = text; }}})")
    page.click("[data-copy]")
    page.wait(f"{label} == 'Copied'")
    assert page.run("copied") == command
    page.run("navigator.clipboard.writeText = async () => { throw new Error('not allowed'); }")
    page.click("[data-copy]")
    page.wait(f"{label} == 'Selected: press Ctrl-C'")
    assert page.run("String(getSelection())").strip() == command

    page.click("[data-part=evaluation] [title='Save this table']")
    name, text = page.run("saved")
    rows = "[...document.querySelectorAll('[data-csv=evaluation] tr')]"
    shown = page.run(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText))")
    saved = [[cell.removeprefix("'") for cell in row] for row in csv.reader(io.StringIO(text))]  # no formulas
    assert name == "evaluation.csv" and saved == shown and len(saved) > 3

    chart = "[data-chart='rollout/combined_score']"
    page.click(f"{chart} [title='Save this curve']")
    name, text = page.run("saved")
    head, *lines = csv.reader(io.StringIO(text))
    assert name == "rollout-combined_score.csv" and head[:3] == ["line", "step", "rollout/combined_score"]
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "rollout"]
    assert [(one, int(step)) for one, step, *_ in lines] == [(run.name, record["step"]) for record in records]
    assert [float(line[2]) for line in lines] == pytest.approx([r["combined_score"] for r in records], rel=1e-5)


def test_an_axis_turns_logarithmic_and_a_double_click_zooms_out(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 80, 3, 4)
    records = [{**r, "grad_norm": 10 ** (r["step"] / 20)} for r in read_metrics(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    opened(page, write_report(run))
    chart = "[data-chart='train/grad_norm']"
    log = f"{chart} [title='Logarithmic axis']"
    page.box(chart)
    page.wait(f"!!document.querySelector(`{chart} canvas`)")
    before = page.run(f"document.querySelector(`{log}`).getAttribute('aria-pressed')")
    page.click(log)
    page.wait(f"document.querySelector(`{log}`).getAttribute('aria-pressed') != '{before}'")
    left, top, width, _ = page.box(f"{chart} .u-over")
    page.drag((left + 0.2 * width, top + 50), (left + 0.4 * width, top + 50), (left + 0.5 * width, top + 50))
    page.wait(f"document.querySelector(`{chart}`).hasAttribute('data-zoomed')")
    for clicks in (1, 2):
        page.drag((left + 0.5 * width, top + 50), clicks=clicks)
    page.wait(f"!document.querySelector(`{chart}`).hasAttribute('data-zoomed')")


def test_a_legend_switches_a_line_off_in_every_curve(page: Page, nine: list[Path], tmp_path: Path) -> None:
    file = write_comparison(run_names(nine), tmp_path / "compare.html").path
    opened(page, file)
    output = "document.querySelector(`[data-chart='rollout/combined_score'] output`).textContent"
    assert [part.split()[0] for part in page.run(output).partition(": ")[2].split(" · ")] == ["A", "B", "C"]
    page.click(".legend button:nth-child(2)")
    page.wait(f"!{output}.includes('B ')")
    assert page.run("document.querySelector('.legend button:nth-child(2)').getAttribute('aria-pressed')") == "false"
    assert page.run("document.querySelectorAll('.tile:first-child img').length") == 9
    page.shape(390, 800)
    page.wait("document.documentElement.clientWidth == 390")
    page.wait(WHOLE)
    assert page.overflow() == 0 and page.requests == [file.as_uri()]


def test_a_watched_run_moves_without_a_reload(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch.observe.watch.EVERY_MS", 50)
    run = write_run(tmp_path / "run", 8, 5, 4, of=16)
    with open_server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            page.open(server.address)
            page.wait(READY)
            page.run("window.mark = 1")
            page.run("document.querySelector('[data-part=details] details').open = true")
            record = {"step": 9, "kind": "rollout", "combined_score": 0.5}
            with (run / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(record) + "\n")
            page.wait(
                "document.querySelector(`[data-chart='rollout/combined_score'] output`).textContent == 'step 9: 0.5'"
            )
            assert page.run("window.mark") == 1 and "step 9 of 16" in page.run("document.body.textContent")
            assert page.run("document.querySelector('[data-part=details] details').open")
            page.wait("document.querySelector('.tile img').naturalWidth == 64")
            goes_on_under_the_hands_of_a_user(page, run)
        finally:
            server.shutdown()
            thread.join()
    page.wait("!document.querySelector('#lost').hidden")
    page.errors.clear()  # of the connection, which was lost on purpose
    assert {address.removeprefix(server.address).partition("?")[0][:11] for address in page.requests} == {
        "", "data", "evaluations"
    }  # fmt: skip


def goes_on_under_the_hands_of_a_user(page: Page, run: Path) -> None:
    """What is pressed stays; evaluations that were deleted and an error in drawing end nothing."""
    page.run(
        "window.asked = []; const ask = fetch; window.fetch = async (...what) => { const answer = await ask(...what); "
        "asked.push(answer.status); const read = answer.json.bind(answer); answer.json = async () => { "
        "const news = await read(); for (const chart of news.page.charts) for (const line of chart.lines) "
        f"line.thinned = true; return news; }}; return answer; }}; {CATCH_FILES}"
    )
    chart = "[data-chart='rollout/combined_score']"
    output, slider = (f"document.querySelector(`{chart} output`).textContent", "document.querySelector('[name=step]')")

    def add(step: int) -> None:
        """A record, which the page has received and dealt with: it has asked again."""
        page.run("asked.length = 0")
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "kind": "rollout", "combined_score": step / 10}) + "\n")
        page.wait("asked.includes(200) && asked.length > asked.indexOf(200) + 1")

    page.run(
        f"{slider}.mark = document.querySelector(`{chart} canvas`).mark = document.querySelector('.tile').mark = 1"
    )
    left, top, width, height = page.box("[name=step]")
    page.mouse("mousePressed", (left + width - 3, top + height / 2))
    add(10)
    assert page.run(output) == "step 9: 0.5"
    page.mouse("mouseReleased", (left + width - 3, top + height / 2))
    page.wait(f"{output} == 'step 10: 1'")
    add(11)
    page.wait(f"{output} == 'step 11: 1.1'")
    assert page.run(f"[{slider}.mark, document.querySelector(`{chart} canvas`).mark]") == [1, 1]

    page.set("#smoothing", 0.9)
    page.click(f"{chart} .head button:last-child")
    assert page.run(output) == "step 11: 1.1"  # extremes are not averaged
    name, table = page.run("saved")
    assert name == "rollout-combined_score-thinned.csv" and "rollout/combined_score (thinned)" in table

    last = page.run(f"Number({slider}.max)")
    assert last == page.run(f"Number({slider}.value)") > 0
    page.set("[name=before]", last)
    shutil.rmtree(max((run / "evaluations").iterdir()))
    add(12)
    assert (
        page.run(f"[{slider}.max, {slider}.value, document.querySelector('[name=before]').value]")
        == [str(last - 1)] * 3
    )
    assert page.run("document.querySelector('.tile img') != null") and page.errors == []

    page.run("document.querySelector('.tools').remove()")  # drawing fails
    add(13)
    assert page.run("document.querySelector('#lost').hidden")
    assert len(page.errors) == 1 and page.errors[0].startswith("TypeError")
