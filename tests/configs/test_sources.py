"""What the run files claim about public runs, and the numbers of their comments.

A header names public runs by a label: with `# follows FG: OWNER/NAME@COMMIT PATH ENTRY` a file has all settings of that
run, with `# cites FG: ...` some of them. A comment behind a value claims `published FG`: it is the same there; or
`published FG 0.04; why`: it is .04 there. `# not as published FG: KEY VALUE; why` is the latter for a key that the file
does not write. tests/data/published.yaml has what stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.config import RunConfig, load_run, numbers
from retouch.config.cost import cost
from retouch.config.derived import snapshots
from tests.families.facts import facts_of

from .conftest import CONFIGS, RUNS, VLM_RUNS, name_of

FILES = [path for path in sorted({*RUNS, *VLM_RUNS}) if path.parent.name != "tiny"]
TABLE: dict[str, dict[str, tuple[str, Any]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "published.yaml").read_text(encoding="utf-8")
)

_SOURCE = re.compile(r"# (follows|cites) ([A-Z]+): (\S+/\S+@[0-9a-f]{7} \S.*)")
_LISTED = re.compile(r"# not as published ([A-Z]+): ([\w.]+) (\[[^;]*\]|[^\s;]+); \S.*")
_CLAIM = re.compile(r"published ([A-Z]+)(?: (\[[^;]*\]|[^\s;,]+))?(?:[;,] \S.*)?")
_FORMER = re.compile(r"\b(Flow-GRPO|DDPO|Tencent|DanceGRPO|Diffusion-DPO|VeRL-Omni|Flow-Factory|DiffusionNFT)'s\b")
"""Claims as prose: no test reads them."""


@dataclass(frozen=True)
class Claim:
    """What a file says of a value of a public run.

    Attributes:
        key: of the value in the run file; a claim about a section is one about each of its keys.
        other: the value there as YAML; None claims that it is the same.
    """

    label: str
    key: str
    other: str | None


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def sources(path: Path) -> dict[str, tuple[str, str]]:
    """Label -> "follows" or "cites", and the source."""
    found = [match.groups() for line in lines_of(path) if (match := _SOURCE.fullmatch(line))]
    assert len({label for _, label, _ in found}) == len(found)
    return {label: (how, source) for how, label, source in found}


def commented(path: Path) -> Iterator[tuple[str, str]]:
    """Key and comment of every line with a value."""
    keys: list[tuple[int, str]] = []
    for line in lines_of(path):
        if match := re.match(r"( *)([\w.]+):", line):
            indent = len(match[1])
            keys = [(n, key) for n, key in keys if n < indent] + [(indent, match[2])]
            _, mark, comment = line.partition(" # ")
            if mark:
                yield ".".join(key for _, key in keys), comment


def claims(path: Path) -> list[Claim]:
    """Every claim of a file."""
    found = [Claim(*match.groups()) for line in lines_of(path) if (match := _LISTED.fullmatch(line))]
    for key, comment in commented(path):
        if "published" in comment:
            match = _CLAIM.fullmatch(comment.strip())
            assert match, f"{key}: {comment!r} names no source that a test can read"
            found.append(Claim(match[1], key, match[2]))
    return found


@cache
def loaded(path: Path) -> RunConfig:
    return load_run(path)


def value_of(path: Path, key: str) -> Any:
    """The value of a run, of a dotted key or of one of the table's own."""
    run = loaded(path)
    if key == "rewards.train":
        return [entry.scorer for entry in run.rewards.values() if entry.role == "train" and entry.weight]
    if key == "steps_an_epoch":
        return numbers(run, devices_of(path)).as_dict()["optimizer_steps_per_epoch"]
    node: Any = run
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return list(node) if isinstance(node, tuple) else node


def devices_of(path: Path) -> int:
    return 32 if "made for 32 devices" in path.read_text(encoding="utf-8") else 8


def equal(ours: Any, there: Any) -> bool:
    return ours == (pytest.approx(there) if isinstance(there, float) else there)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_run_that_follows_another_lists_every_difference(path: Path) -> None:
    for label, (how, source) in sources(path).items():
        assert source in TABLE, f"{source}: not in tests/data/published.yaml"
        if how == "cites":
            continue
        listed = {claim.key for claim in claims(path) if claim.label == label and claim.other is not None}
        differs = {key for key, (_, there) in TABLE[source].items() if not equal(value_of(path, key), there)}
        assert listed == differs, f"{source}: {differs ^ listed}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_claim_about_a_public_run_is_true(path: Path) -> None:
    named = sources(path)
    used = set[str]()
    for claim in claims(path):
        assert claim.label in named, f"{claim.key}: no header names {claim.label}"
        used.add(claim.label)
        rows = TABLE[named[claim.label][1]]
        if claim.other is not None:
            there = yaml.safe_load(claim.other)
            assert equal(rows[claim.key][1], there), f"{claim.key}: {rows[claim.key]} there"
            assert not equal(value_of(path, claim.key), there), f"{claim.key}: the same there"
            continue
        keys = [key for key in rows if key == claim.key or key.startswith(f"{claim.key}.")]
        assert keys, f"{claim.key}: {named[claim.label][1]} has no such value in the table"
        for key in keys:
            assert equal(value_of(path, key), rows[key][1]), f"{key}: {rows[key]} there"
    assert used == named.keys()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_claim_is_prose(path: Path) -> None:
    for line in lines_of(path):
        if line.startswith("#"):
            assert "published" not in line or _LISTED.fullmatch(line), line
        elif _FORMER.search(line):
            raise AssertionError(line)


def test_every_source_is_named_by_a_file() -> None:
    assert {source for path in FILES for _, source in sources(path).values()} == TABLE.keys()


def test_a_false_claim_is_found(tmp_path: Path) -> None:
    """Of each kind: a value that is another one there, a deviation that is none, and a comment without a source."""
    path = tmp_path / "run.yaml"
    text = (CONFIGS / "z_image_grpo.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("group_size: 16  ", "group_size: 8  "),
        ("noise_level: 0.7                # published FF", "noise_level: 0.7                # published FF 0.9; why"),
        ("group_size: 16                  # published FF", "group_size: 16                  # published"),
        ("num_steps: 10                   # published FF", "num_steps: 11"),
    ):
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        loaded.cache_clear()
        with pytest.raises(AssertionError):
            test_every_claim_about_a_public_run_is_true(path)
            test_a_run_that_follows_another_lists_every_difference(path)
    loaded.cache_clear()


# --- numbers of comments ---


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_numbers_of_its_comments_follow_from_its_options(path: Path) -> None:
    run, text = loaded(path), path.read_text(encoding="utf-8")
    derived = numbers(run, devices_of(path)).as_dict()
    expected: dict[str, float] = {
        r"([\d,]+) images an epoch": derived.get("global_images_per_epoch", 0),
        r"([\d,]+) images a batch": derived.get("global_images_per_rollout_batch", 0),
        r"(\d+) of RL\b": run.training.max_steps - derived.get("warmup_steps", 0),
        r"(\d+) of online DPO": run.training.max_steps - derived.get("warmup_steps", 0),
        r"(\d+) requests in training": judged_images(run, derived) * requests_per_image(run),
        r"costs (\d) requests?:": requests_per_image(run),
        r"(\d+) GB each": saved_gb(run),
        r"the (\d+) servers that `check` counts": cost(run, devices_of(path)).replicas,
        r"`check` counts (\d+) servers beside": cost(run, devices_of(path)).replicas,
        r"(\d+) for each machine of eight": cost(run, 8).replicas,
    }
    for pattern, value in expected.items():
        for number in re.findall(pattern, text):
            assert int(number.replace(",", "")) == round(value), pattern


def judged_images(run: RunConfig, derived: dict[str, int | float]) -> float:
    return run.training.max_steps * derived.get("global_completions_per_step", 0)


def requests_per_image(run: RunConfig) -> int:
    [entry] = run.rewards.values() if len(run.rewards) == 1 else [None]
    return {"complex_edit": 2 * getattr(entry, "samples", 0), "mmmg": 1}.get(getattr(entry, "scorer", ""), 0)


def saved_gb(run: RunConfig) -> float:
    """Of a checkpoint of all weights in fp32: the weights, two moments of AdamW and every snapshot."""
    return (3 + len(snapshots(run))) * 4 * facts_of(run.model.family).parameters / 1e9


def paid(path: Path) -> list[str]:
    """Rewards whose judge is at OpenAI."""
    rewards = loaded(path).rewards.items()
    return [name for name, entry in rewards if "api.openai.com" in str(getattr(entry, "address", ""))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_pays_a_judge_without_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only runs that train a text encoder have one by default, whose price is that of a GPU of some days."""
    loaded.cache_clear()
    assert (paid(path) != []) == (path in VLM_RUNS)
    for name in paid(path):
        entry: Any = loaded(path).rewards[name]
        assert entry.budget_dollars and (entry.price_in, entry.price_out) == (2.5, 10.0)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_run_on_ocr_has_a_gold_reward_that_stops_it(path: Path) -> None:
    run = loaded(path)
    if not run.algorithm.trains_on_rewards or "ocr" not in run.rewards or path.parent.name == "reproduce":
        return
    gold = [entry.scorer for entry in run.rewards.values() if entry.role == "gold"]
    assert gold and run.evaluation.on_gold_fall == "stop"
    assert gold != ["ocr"] or "recognizer" in run.rewards


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_run_that_stops_on_a_plateau_evaluates_enough_examples_to_see_one(path: Path) -> None:
    """docs/expect.md: 64 end at the last step. The evaluations of reward gradients would cost as much as the rest."""
    run = loaded(path)
    if run.training.stop_on_plateau is not False:
        assert run.evaluation.num_examples >= (64 if run.algorithm.name == "reward_gradient" else 256)
