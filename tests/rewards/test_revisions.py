"""Two values of an option that changes scores are two revisions, and so two keys of a cache, for every scorer."""

from __future__ import annotations

import hashlib
import shutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from retouch.families.image_encoder import TINY
from retouch.rewards import REWARDS
from retouch.rewards.base import UNSCORED, PackageScorer, RewardEntry
from retouch.rewards.client.cache import cache_key
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.fn import FnReward
from retouch.rewards.scorers.weights import version_of
from retouch.types import Score
from tests.rewards.openai_server import OpenAIServer
from tests.rewards.test_independence import _tiny, files_of, loaded  # noqa: F401  a fixture
from tests.tiny_models import tiny_clip

REQUIRED: dict[str, dict[str, Any]] = {
    "aesthetic_v1": {"head": "head.pth"},
    "editreward": {"path": "somewhere"},
    "fn": {"fn": "my_rewards:score"},
    "imgedit": {"prompts": "prompts.json"},
    "lpips": {"backbone": "vgg16.pth", "heads": "vgg.pth"},
    "taste": {"path": "taste.safetensors"},
}
"""Options without a default."""

OTHERS: dict[str, list[Any]] = {
    "fn": ["my_rewards:other"],
    "question": ["Is it {prompt}?"],
    "readability": ["my_segmenter:regions", "sam2"],
    "needs": [["mask"]],
    "detector_url": ["http://127.0.0.1:1"],
    "wording": [],  # needs files; tests/rewards/test_complex_edit.py, test_mmmg.py, test_textedit_judge.py
    "prompts": [],
    "rounds": [2],
}
"""Option -> other values, where its type does not tell any."""

BESIDE: dict[str, dict[str, Any]] = {
    "against": {"form": "pair"},
    "rounds": {"form": "pair"},
}
"""Option -> values of others that it needs."""


def options_of(name: str) -> dict[str, Any]:
    entry = REWARDS[name]
    judge = {"model": "m", "address": "http://127.0.0.1:1/v1"} if "address" in entry.model_fields else {}
    return {**judge, **REQUIRED.get(name, {})}


def entries(name: str, option: str) -> Iterator[RewardEntry]:
    """The entry with the default of an option, and with every other value that is told from its type and valid."""
    kind = REWARDS[name]
    base = options_of(name)
    beside = {key: value for key, value in BESIDE.get(option, {}).items() if key in kind.model_fields}
    found = OTHERS[option] if option in OTHERS else others(kind.model_fields[option].annotation, base.get(option))
    for change in ({}, *({**beside, option: value} for value in found)):
        try:
            yield kind.model_validate({**base, **change, "scorer": name})
        except ValidationError:
            continue


def others(annotation: Any, given: Any) -> list[Any]:
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    members = [one for part in typing.get_args(annotation) for one in others(part, given)]
    by_type = {bool: [True, False], int: [7, 8], float: [0.1, 0.9, 1.5], str: [f"{given or 'a'}2", "zh", "b"]}
    return [*members, *by_type.get(annotation, [])]


OPTIONS = [
    (name, option)
    for name in REWARDS
    for option in REWARDS[name].own_options()
    if option not in {*UNSCORED, *REWARDS[name].unscored, "scorer"} and OTHERS.get(option) != []
]


@pytest.fixture(autouse=True)
def _without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Revisions name versions of packages that this environment need not have."""
    for module in ("imscore", "reading"):
        monkeypatch.setattr(f"retouch.rewards.scorers.{module}.installed_version", lambda _: "1.0")
    monkeypatch.setattr("retouch.rewards.scorers.paddle.version", lambda: "1.0")
    monkeypatch.setattr("retouch_bench.scorers.imgedit.read_questions", lambda path: {"add": path})


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda one: one)
def test_two_values_of_an_option_are_two_revisions(name: str, option: str) -> None:
    by_value = {repr(getattr(entry, option)): entry.make().spec.revision for entry in entries(name, option)}
    assert len(by_value) >= 2, "the test has no two values of this option: add some to OTHERS"
    assert len(set(by_value.values())) == len(by_value)


def test_options_without_effect_on_scores_are_one_revision() -> None:
    """Pace, place and price."""
    changes: dict[str, Any] = {
        "concurrency": 3, "timeout_s": 9.0, "requests_per_minute": 7.0, "tokens_per_minute": 7.0, "budget_requests": 4,
        "budget_tokens": 5, "price_in": 1.0, "price_out": 2.0, "budget_dollars": 3.0, "weight": 2.0, "threads": 2,
        "images_per_forward": 3, "min_group_std": 0.1, "key_header": "api-key",
        "address": "http://127.0.0.1:2/v1",
    }  # fmt: skip
    for name in REWARDS:
        kind, base = REWARDS[name], options_of(name)
        known = {key: value for key, value in changes.items() if key in kind.model_fields}
        one, other = (kind.model_validate({**base, **more, "scorer": name}).make() for more in ({}, known))
        heads = name in ("hpsv3", "editreward", "vlm")  # whose score is of its batch by rounding
        assert (one.spec.revision == other.spec.revision) is not heads, name


WEIGHTS = {
    *("path", "processor", "base", "head", "backbone", "heads", "image_encoder", "detector", "color_model"),
    *("segmenter", "extractor"),
}
"""Options whose values are hub ids, folders or files with what a scorer loads."""

SUFFIXES = (".safetensors", ".pt", ".pth")

LOADS = [name for name in REWARDS if WEIGHTS & REWARDS[name].model_fields.keys()]


def replace_weights(place: Path) -> None:
    """Other weights of the same names and sizes, in a file or a folder; in one without weights, other settings."""
    found = [place] if place.is_file() else [file for file in place.iterdir() if file.suffix in SUFFIXES]
    for file in found or place.glob("*config.json"):
        if file.suffix in (".pt", ".pth"):
            torch.save(shifted(torch.load(file)), file)
        else:
            content = file.read_bytes()
            file.write_bytes(content + b"\n" if file.suffix == ".json" else content[:-1] + bytes([content[-1] ^ 1]))


def shifted(value: Any) -> Any:
    return {key: shifted(one) for key, one in value.items()} if isinstance(value, dict) else value + 1


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.usefixtures("_tiny")
def test_other_weights_at_a_path_are_another_revision(name: str, tmp_path: Path) -> None:
    """A link to the newest export, or a file that was written again: scores of both must not mix in a cache."""
    given = {"style": {"gate": 0.0}, "mmmg": {"readability": "sam2"}}.get(name, {})
    own = {"image_encoder": str(TINY)} if name == "style" else {"path": tiny_clip()}
    files = files_of(name, given, tmp_path) or own  # the stand-in for imscore reads no file
    options = sorted(option for option in WEIGHTS & files.keys() if files[option])
    for option in options:
        source, copied = Path(files[option]), tmp_path / f"copy-{option}"
        shutil.copytree(source.parent if source.is_file() else source, copied, dirs_exist_ok=True)
        files[option] = str(copied / source.name if source.is_file() else copied)
    with OpenAIServer() as server:
        seen = [loaded(name, given, files, server).spec.revision]
        for option in options:
            replace_weights(Path(files[option]))
            seen.append(loaded(name, given, files, server).spec.revision)
    assert len(set(seen)) == len(options) + 1 > 1


def test_the_version_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a link leads, without the hidden files of tools; of a hub id the commit that was loaded."""
    for name in ("old", "new"):
        (tmp_path / name / "part" / ".cache").mkdir(parents=True)
        (tmp_path / name / ".cache").mkdir()
        (tmp_path / name / "part" / "model.safetensors").write_text(name)
    latest, found = tmp_path / "latest", list[str]()
    for name in ("old", "new", "old"):
        for place in (".cache", "part/.cache"):
            (tmp_path / name / place / "time").write_text(str(found))
        latest.unlink(missing_ok=True)
        latest.symlink_to(tmp_path / name)
        found.append(version_of(str(latest)))
    assert found[0] == found[2] != found[1]
    monkeypatch.setattr("retouch.rewards.scorers.weights.snapshot", {"a/b": "/hub/snapshots/c0ffee"}.get)
    loaded_config = SimpleNamespace(_commit_hash="5eed")
    given = [("a/b", None), ("a/b", loaded_config), ("a/c", None)]
    assert [version_of(*one) for one in given] == ["c0ffee", "5eed", "unknown commit"]
    assert version_of(str(latest), loaded_config) == found[2]  # a config.json may name a commit


def test_a_small_file_beside_large_weights_is_another_version(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(4 << 20))
    found: list[str] = []
    for size in (224, 384):
        (tmp_path / "preprocessor_config.json").write_text(f'{{"size": {size}}}')
        found.append(version_of(str(tmp_path)))
    assert found[0] != found[1]


class PlainReward(RewardEntry):
    """A reward of another package that names nothing in its revision, as the page on extending shows one."""

    unscored = frozenset({"label"})

    scorer: Literal["plain"] = "plain"
    region: Literal["image", "mask"] = "image"
    sizes: tuple[int, ...] = (1, 2)
    label: str = ""

    def make(self) -> PlainScorer:
        return PlainScorer(self)


class PlainScorer(PackageScorer[PlainReward]):
    def score(self, items: Any) -> list[Any]:
        return [Score(0.0) for _ in items]


def test_a_scorer_that_names_no_revision_has_keys_by_its_options() -> None:
    item = RewardItem(0, "p", np.zeros((2, 2, 3), np.uint8))

    def key(**options: Any) -> bytes:
        return cache_key(item, "plain", PlainReward(**options).make().spec.revision)

    assert len({key(), key(region="mask"), key(sizes=(2, 1)), key(region="mask", sizes=(2, 1))}) == 4
    assert (
        key() == key(label="a") == key(weight=3.0) == key(region="image") and PlainReward().make().spec.revision == "1"
    )
    scorer = PlainReward(region="mask").make()
    before = scorer.spec.revision
    scorer.set_revision(f"weights {scorer.spec.revision}")  # as scorers extend their own in `load`
    assert scorer.spec.revision == f"weights {before}" and before.count("options") == 1


def test_the_example_on_the_page_is_covered() -> None:
    from examples.plugin.retouch_example.warmth import WarmthReward

    assert WarmthReward().make().spec.revision != WarmthReward(region="mask").make().spec.revision


def _revision_of_function(folder: Path, fn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As a new process in this folder has it."""
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("faults_reward", "faults_helper")]:
            patch.delitem(sys.modules, name)
        scorer = FnReward(fn=fn).make()
        scorer.load("cpu")
        return scorer.spec.revision


def test_modules_that_a_function_imports_from_its_folder_are_in_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its package, too, and where a function imports them; neither those beside it nor those of libraries."""
    package, helpers = tmp_path / "faults_reward", tmp_path / "faults_helper"
    for folder in (package, helpers):
        folder.mkdir()
    imports = "import numpy\nfrom . import part\n\n\ndef score(items):\n    import faults_helper.deep\n    return []\n"
    written = {
        package / "__init__.py": "",
        package / "scores.py": imports,
        package / "part.py": "from .other import X\n",
        package / "other.py": "X = 1\n",
        package / "unread.py": "",
        helpers / "__init__.py": "",
        helpers / "deep.py": "from faults_reward.scores import score\n",
        tmp_path / "faults_alone.py": "def score(items):\n    return []\n",
    }
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
    before = _revision_of_function(tmp_path, "faults_reward.scores:score", monkeypatch)
    assert _revision_of_function(tmp_path, "faults_reward.scores:score", monkeypatch) == before
    for file, text in written.items():
        file.write_text(f"{text}# another\n", encoding="utf-8")
        differs = _revision_of_function(tmp_path, "faults_reward.scores:score", monkeypatch) != before
        assert differs == (file.name not in ("unread.py", "faults_alone.py")), file
        file.write_text(text, encoding="utf-8")
    alone = hashlib.blake2b(written[tmp_path / "faults_alone.py"].encode(), digest_size=6).hexdigest()
    found = _revision_of_function(tmp_path, "faults_alone:score", monkeypatch)
    assert found == f"fn faults_alone:score {alone} options {FnReward(fn='faults_alone:score').options_digest()}"
