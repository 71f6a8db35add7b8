"""Scores on record count exactly for what a scorer received: every option of every benchmark, in one folder."""

from __future__ import annotations

import itertools
import json
import logging
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.observations import OutputIdentity, reward_digest, reward_digests
from retouch.benchmarks.outputs import Shard, outputs_of
from retouch.data.dataset import load_dataset
from retouch.errors import ConfigError, DataError, RewardOutage
from retouch.lru import LruCache
from retouch.process.plain_text import count_of
from retouch.rewards import REWARDS
from retouch.rewards.base import UNSCORED, RewardEntry
from retouch.rewards.client.revisions import Revisions, without_fingerprints
from retouch.rewards.protocol import PICTURES, RewardItem
from retouch.rewards.scorers.clip import ClipReward
from retouch.rewards.scorers.kept_area import KeptAreaReward
from retouch.rewards.table import RewardTable
from retouch.types import Failure, Outcome, Score
from retouch.use.benchmark import run_benchmark
from retouch.use.benchmark_scores import OutputReader
from tests.benchmarks_room import cases, text_cases
from tests.benchmarks_room.cases import CASES, write_brushbench
from tests.benchmarks_room.text_cases import TEXT_CASES
from tests.rewards.openai_server import KEY, OpenAIServer

HERE = "tests.benchmarks_room.test_observed"


_OUTPUTS, _READ = 6, 3  # of each benchmark: with an image, and whose keys are compared


def benchmark(name: str, path: Path, **options: Any) -> Benchmark:
    return BENCHMARKS[name].model_validate({"name": name, "path": str(path), **options})


def write_images(given: Benchmark, folder: Path, suffix: str = ".png", side: int = 64, most: int = _OUTPUTS) -> Path:
    """A noisy image under every official name that has none, each another one."""
    items = load_dataset(given.data(), "--path", frozenset()).items
    for output in outputs_of(given, items)[:most]:
        path = (folder / output.file).with_suffix(suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            continue
        coarse = np.random.default_rng(list(output.own_file.encode())).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(coarse).resize((side, side)).save(path, quality=75)
    return folder


def scored(given: Benchmark, images: Path, out: Path) -> dict[str, Any]:
    result = run_benchmark(given, {}, [images], out)
    assert result is not None
    return result


# --- what is scored ---


@pytest.fixture
def brushbench(tmp_path: Path) -> Path:
    return write_brushbench(tmp_path / "data", count=1)


SETTINGS: list[dict[str, Any]] = [
    {}, {"saved_as": "jpeg"}, {"blended": True}, {"blended": True, "saved_as": "jpeg"}, {"region": "outside"},
]  # fmt: skip


def test_settings_of_a_benchmark_take_turns_in_one_folder(brushbench: Path, tmp_path: Path) -> None:
    """Each has the scores of a folder of its own, whatever was scored before, and a second time too."""
    rewards: dict[str, Any] = {"clip": None}
    images = write_images(benchmark("brushbench", brushbench, rewards=rewards), tmp_path / "theirs")
    found: list[float] = []
    for number, options in enumerate([*SETTINGS, *SETTINGS[:2]]):
        given = benchmark("brushbench", brushbench, rewards=rewards, **options)
        together, alone = (scored(given, images, tmp_path / out) for out in ("out", f"alone{number}"))
        assert together["measures"] == alone["measures"]
        found.append(together["measures"]["theirs"]["psnr"])
    assert len(set(found)) == len(SETTINGS) and found[:2] == found[len(SETTINGS) :]


def test_outcomes_of_other_settings_are_not_made_again_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, before the first request; not of files without an outcome, nor of outcomes that count."""
    rewards: dict[str, Any] = {"clip": None}
    folder, images = write_brushbench(tmp_path / "data", count=3), tmp_path / "theirs"
    submit = RewardTable.submit
    monkeypatch.setattr(RewardTable, "submit", lambda *a, **k: logging.info("request") or submit(*a, **k))
    blended: dict[str, Any] = {"blended": True}
    again = "are of another version, of other options or of other images; they are scored again"
    for options, most, earlier in (({}, 2, 0), ({}, 2, 0), (blended, 3, 2), ({}, 3, 1), (blended, 3, 0)):
        given = benchmark("brushbench", folder, rewards=rewards, **options)
        write_images(given, images, most=most)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            scored(given, images, tmp_path / "out")
        told = [line for line in caplog.messages if line == "request" or "earlier outcomes" in line]
        assert [line for line in told if line != "request"] == [f"theirs: {earlier} earlier outcomes {again}"] * bool(
            earlier
        )
        assert not earlier or "request" in told[1:]


def test_official_jpeg_files_are_scored_as_they_are(brushbench: Path, tmp_path: Path) -> None:
    """Through the files: the script of the paper compresses once, and so do files that it wrote."""
    rewards: dict[str, Any] = {"clip": None}
    plain, jpeg = (benchmark("brushbench", brushbench, rewards=rewards, **o) for o in ({}, {"saved_as": "jpeg"}))
    theirs, lossless = (write_images(plain, tmp_path / suffix, suffix, 512) for suffix in (".jpg", ".png"))
    of_files = [
        scored(given, theirs, tmp_path / str(given.model_dump()["saved_as"]))["measures"][".jpg"]
        for given in (plain, jpeg)
    ]
    assert of_files[0] == of_files[1]
    compressed = scored(jpeg, lossless, tmp_path / "once")["measures"][".png"]
    assert compressed["psnr"] == pytest.approx(of_files[1]["psnr"], abs=1e-9)
    assert compressed["psnr"] != scored(plain, lossless, tmp_path / "none")["measures"][".png"]["psnr"]


def test_distances_are_of_the_images_that_are_scored(brushbench: Path, tmp_path: Path) -> None:
    """Composited and compressed, if these are what the benchmark scores."""

    class Colour(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().flatten(2).mean(2)

    torch.jit.script(Colour()).save(str(tmp_path / "colour.pt"))
    entry = {"measure": "kid", "extractor": "torchscript", "path": str(tmp_path / "colour.pt"), "draws": 0}
    for number in range(2):
        Image.new("RGB", (9, 9), (90, 80 * number, 7)).save(tmp_path / f"{number}.png")
    keys: dict[str, Any] = {
        "rewards": {"clip": None, "kept_area": None}, "images_per_item": 2,
        "distances": {"d": {**entry, "real": str(tmp_path)}},
    }  # fmt: skip
    found: list[float] = []
    images = write_images(benchmark("brushbench", brushbench, **keys), tmp_path / "theirs")
    for number, options in enumerate(SETTINGS[:4]):
        given = benchmark("brushbench", brushbench, **keys, **options)
        found.append(scored(given, images, tmp_path / str(number))["distances"]["theirs"]["d"]["value"])
    assert len(set(found)) == 4


# --- the walk over options ---

OTHERS: dict[str, list[Any]] = {
    "resolution": [[48, 80]],
    "image_root": ["{folder}/data"],
    "images": ["{folder}"],
    "prompts": ["{folder}/other_prompts.json"],
    "complexity": ["1", "1,8"],
    "levels": ["phd", "preschool"],
    "disciplines": ["Biology"],
    "held_out_share": [0.5],
    "distances": [{"kid": {"measure": "kid", "path": "somewhere"}}],
    "reward_client": [{"batch_size": 3}],
    "rewards": [{"{reward}": {"crop": "mask_box"}}, {"{reward}": {"paste_back": True}}],
}
"""Option -> other values, where its type does not tell any."""

UNSCORED_OPTIONS = {
    "name": "is the benchmark",
    "path": "is the data, whose content counts",
    "images_per_item": "chooses outputs",
    "limit": "chooses items",
    "held_out_share": "chooses items",
    "max_bad_items": "chooses whether broken items end the run",
    "num_steps": "samples", "guidance_scale": "samples", "seed": "samples", "resolution": "samples",
    "distances": "compares sets of images, beside the scores",
    "reward_client": "is how servers are called",
    "part": "chooses items", "complexity": "chooses items", "image_type": "chooses items", "levels": "chooses items",
    "disciplines": "chooses items",
    "images": "is a place of images, whose content counts", "image_root": "is a place of images, whose content counts",
    ("gedit", "language"): "chooses items",
    ("longtext", "language"): "chooses items, whose target texts are of that language",
}  # fmt: skip
"""Options that change no score of an output that both settings have, of every benchmark or of one, and why."""

SCORED = {("anytext", "resolution"): "is the size of the polygons"}
"""Options that do, in spite of `UNSCORED_OPTIONS`."""

WALK = sorted(CASES | TEXT_CASES)


@pytest.fixture
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is built: entries are described, not loaded."""
    monkeypatch.setattr(cases, "tiny_detector", lambda path: path)
    for module in (cases, text_cases):
        monkeypatch.setattr(module, "tiny_clip", lambda: "clip")
    for module in ("imscore", "reading"):
        monkeypatch.setattr(f"retouch.rewards.scorers.{module}.installed_version", lambda _: "1.0")
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("JUDGE_MODEL", "judge")


def others(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    members = [one for part in typing.get_args(annotation) for one in others(part)]
    return [*members, *{bool: [True, False], int: [1, 3], float: [0.5, 2.5]}.get(annotation, [])]


def variants(name: str, option: str, keys: Mapping[str, Any], folder: Path) -> Iterator[Benchmark]:
    """The benchmark with every other value of an option that is valid."""
    kind = BENCHMARKS[name]
    reward = next(iter(kind.default_rewards(keys)))
    given = OTHERS.get(option) or others(kind.model_fields[option].annotation)
    filled = json.loads(json.dumps(given).replace("{folder}", str(folder)).replace("{reward}", reward))
    for value in filled:
        more = {**keys.get("rewards", {}), **value} if option == "rewards" else value
        try:
            yield kind.model_validate({**keys, option: more})
        except (ValidationError, ConfigError):
            continue


Keys = dict[str, tuple[OutputIdentity, dict[str, str]]]
Received = dict[str, tuple[Any, ...]]


def observed(given: Benchmark, images: Path) -> tuple[Keys, Received]:
    """Output -> the key of its observation; output -> what scorers receive, told apart by this test alone."""
    data = load_dataset(given.data(), "--path", frozenset())
    reader = OutputReader(given, data.config)
    revisions = {name: entry.make().spec.revision for name, entry in given.rewards.items()}
    digests = reward_digests(given.rewards, revisions)
    entries = [told(entry, revisions[name]) for name, entry in given.rewards.items()]
    found, _ = reader.found(images, outputs_of(given, data.items)[:_READ])
    keys = {one.output.file: (one.asked, digests) for one in found}
    received = {one.output.file: (*content(reader.item(one.output, one.path, LruCache(1))), *entries) for one in found}
    return keys, received


def content(item: RewardItem) -> tuple[Any, ...]:
    pixels = [getattr(item, name) for name in PICTURES]
    text = json.dumps([item.prompt, item.metadata], sort_keys=True, default=str)
    return text, *((one.shape, one.tobytes()) if one is not None else None for one in pixels)


def told(entry: RewardEntry, revision: str) -> tuple[Any, ...]:
    options = entry.model_dump(mode="json", exclude={*UNSCORED, *type(entry).unscored})
    return revision, json.dumps(options, sort_keys=True)


@pytest.mark.parametrize("name", WALK)
def test_the_key_of_an_observation_changes_with_what_scorers_receive(name: str, _stubs: None, tmp_path: Path) -> None:
    """One option after the other: a key changes exactly if what scorers receive does, and an option with which none
    does is declared."""
    folder = tmp_path / "data"
    keys = {"name": name, "path": str(folder), **(CASES | TEXT_CASES)[name].write(folder)}
    if (folder / "prompts.json").is_file():
        text = (folder / "prompts.json").read_text(encoding="utf-8")
        (folder / "other_prompts.json").write_text(text.replace("Judge", "Rate"), encoding="utf-8")
    plain = BENCHMARKS[name].model_validate(keys)
    images = write_images(plain, tmp_path / "images")
    key_of, received = observed(plain, images)
    assert key_of
    changing: set[str] = set()
    for option in BENCHMARKS[name].model_fields:
        given = [] if option in ("name", "path") else list(variants(name, option, keys, folder))
        assert given or option in ("name", "path", "held_out_share"), f"no other value of {option}: add one to OTHERS"
        for other in given:
            try:
                other_keys, other_received = observed(other, write_images(other, images) and images)
            except (ConfigError, DataError):  # held_out_share of a format without parts; a part that has no data here
                continue
            for file in key_of.keys() & other_keys.keys():
                assert (key_of[file] == other_keys[file]) == (received[file] == other_received[file]), option
                changing |= {option} if key_of[file] != other_keys[file] else set()
    unscored = {
        option for option in BENCHMARKS[name].model_fields
        if (option in UNSCORED_OPTIONS or (name, option) in UNSCORED_OPTIONS) and (name, option) not in SCORED
    }  # fmt: skip
    assert BENCHMARKS[name].model_fields.keys() - changing == unscored


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("name", REWARDS.available())
def test_every_option_of_a_reward_is_in_its_key_or_declared_as_without_effect(name: str) -> None:
    entry = REWARDS[name].model_construct(scorer=name)
    declared = {*UNSCORED, *type(entry).unscored}
    for option in type(entry).model_fields:
        other = entry.model_copy(update={option: "another value"})
        assert (reward_digest(entry, "r") == reward_digest(other, "r")) == (option in declared), option


def test_a_gated_value_is_of_its_gate_too() -> None:
    """Its key changes with the options and the revision of the gate, and that of the gate with its own alone."""
    gated = ClipReward(gated_by="kept")
    one, *others = (
        reward_digests({"kept": gate, "clip": gated}, {"kept": revision, "clip": "c"})
        for gate, revision in (
            (KeptAreaReward(), "k"), (KeptAreaReward(crop="mask_box"), "k"), (KeptAreaReward(), "another"),
        )
    )  # fmt: skip
    for other in others:
        assert one["clip"] != other["clip"] and one["kept"] != other["kept"]
    free = reward_digests({"kept": KeptAreaReward(), "clip": ClipReward()}, {"kept": "k", "clip": "c"})
    assert free["kept"] == one["kept"]
    assert free["clip"] == reward_digest(ClipReward(), "c")


# --- images that always fail ---

_FAILING: set[str] = set()
"""Prompts of images whose scorer gives no answer in time; "*" is every image, "golden" those that are known."""

_ASKED: list[str] = []


def flaky(items: Any) -> list[Outcome]:
    found: list[Outcome] = []
    for item in items:
        known = "golden" if "GOLD" in item.prompt else item.prompt
        _ASKED.append(known)
        lost = known in _FAILING or "*" in _FAILING
        found.append(Failure("unavailable", "no answer in time", True) if lost else Score(float(item.image.mean())))
    return found


@pytest.fixture
def flaky_benchmark(tmp_path: Path) -> Iterator[tuple[Benchmark, Path]]:
    """Four items that are scored in batches of two."""
    _FAILING.clear()
    _ASKED.clear()
    given = benchmark(
        "brushbench", write_brushbench(tmp_path / "data", 4), reward_client={"batch_size": 2},
        rewards={"clip": {"scorer": "fn", "fn": f"{HERE}:flaky"}, "kept_area": None},
    )  # fmt: skip
    yield given, write_images(given, tmp_path / "theirs")
    _FAILING.clear()


def failures(result: Mapping[str, Any]) -> Any:
    return result["weights"]["theirs"]["failures"]


@pytest.mark.parametrize("failing", [["thing 3"], ["thing 0", "thing 1"], [f"thing {n}" for n in range(4)]])
def test_images_that_always_fail_are_counted_and_keep_no_result_back(
    failing: list[str], flaky_benchmark: tuple[Benchmark, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One, a whole batch, all of them: at every start again, while the scorer answers about other images."""
    given, images = flaky_benchmark
    _FAILING.update(failing)
    for start in range(3):
        caplog.clear()
        _ASKED.clear()
        result = scored(given, images, tmp_path / "out")
        assert failures(result) == {"clip": {"unavailable": len(failing)}}
        assert sorted(set(_ASKED) - {"golden"}) == (failing if start else [f"thing {n}" for n in range(4)])
        assert f"clip: no score of {count_of(len(failing), 'image')}: unavailable x {len(failing)}" in caplog.text
    _FAILING.clear()
    assert failures(scored(given, images, tmp_path / "out")) == {}


@pytest.mark.parametrize("answered", [0, 2])
def test_a_scorer_that_answers_nothing_more_ends_the_evaluation(
    answered: int, flaky_benchmark: tuple[Benchmark, Path], tmp_path: Path
) -> None:
    given, images = flaky_benchmark
    _FAILING.update(["golden", *(f"thing {n}" for n in range(answered, 4))])
    with pytest.raises(RewardOutage, match=r"clip: unavailable x 2 \(no answer in time\).*start again"):
        run_benchmark(given, {}, [images], tmp_path / "out")
    _FAILING.clear()
    _ASKED.clear()
    assert failures(scored(given, images, tmp_path / "out")) == {}
    assert len(_ASKED) == 4 - answered


def test_failures_that_no_second_try_changes_are_in_the_warning(
    flaky_benchmark: tuple[Benchmark, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, images = flaky_benchmark
    next(images.rglob("*0.png")).write_bytes(b"no image")
    _FAILING.add("thing 2")
    assert failures(scored(given, images, tmp_path / "out")) == {"clip": {"bad_item": 1, "unavailable": 1}}
    assert "clip: no score of 2 images: bad_item x 1" in caplog.text


# --- judges ---


class Turning(OpenAIServer):
    """A judge whose replies name another machine every time, and perhaps another model."""

    turns: Iterator[tuple[str, str]]

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, fingerprint = next(self.turns)
        return {**super().complete(asked), "model": model, "system_fingerprint": fingerprint}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turning]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Turning() as server:
        server.turns = itertools.cycle([("judge-1", f"fp_{n}") for n in range(3)])
        yield server


def judged(path: Path, judge: OpenAIServer, count: int = 6) -> Benchmark:
    path.write_text("".join(f'a sign "{n}"\n' for n in range(count)), encoding="utf-8")
    entry = {"scorer": "openai_judge", "model": "judge", "address": judge.url, "concurrency": 1}
    return benchmark("ocr_prompts", path, rewards={"flow_grpo_ocr": entry, "ocr": None})


def test_a_judge_on_several_machines_is_asked_once(judge: Turning, tmp_path: Path) -> None:
    """The first question of each start is answered by another one of them."""
    given = judged(tmp_path / "test.txt", judge)
    images = write_images(given, tmp_path / "theirs")
    asked: list[int] = []
    for _ in range(3):
        before = len(judge.asked)
        result = scored(given, images, tmp_path / "out")
        asked.append(len(judge.asked) - before)
        next(judge.turns)
    assert asked == [7, 1, 1]
    told = result["rewards"]["flow_grpo_ocr"]["revisions"]
    assert {f"fp_{n}" for n in range(3)} == {one for one in json.dumps(told).replace('"', " ").replace(",", " ").split()
                                              if one.startswith("fp_")}  # fmt: skip


def test_shards_of_a_judge_on_several_machines_agree(judge: Turning, tmp_path: Path) -> None:
    given = judged(tmp_path / "test.txt", judge, 20)
    images = write_images(given, tmp_path / "theirs", most=20)
    found = [run_benchmark(given, {}, [images], tmp_path / "out", Shard(n, 2)) for n in range(2)]
    assert found[0] is None and found[1] is not None
    assert failures(found[1]) == {}


def test_another_model_behind_the_same_name_is_asked_again(judge: Turning, tmp_path: Path) -> None:
    given = judged(tmp_path / "test.txt", judge)
    images = write_images(given, tmp_path / "theirs")
    scored(given, images, tmp_path / "out")
    judge.turns = itertools.cycle([("judge-2", "fp_0")])
    before = len(judge.asked)
    scored(given, images, tmp_path / "out")
    assert len(judge.asked) - before == 7


HASH, OTHER = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (f"v m served as m fp_1 {HASH}", f"v m served as m fp_2 {HASH}", True),
        (f"v m served as m fp_1, m fp_2 {HASH}", f"v m served as m {HASH}", True),
        (f"v m served as m {OTHER} {HASH} options {HASH}", f"v m served as m {HASH} options {HASH}", True),
        (f"v m served as m {OTHER}, m fp {HASH}", f"v m served as m {HASH}", True),
        (f"v m served as m fp_1 {HASH} 0..1 seam 1", f"v m served as m fp_2 {HASH} 0..1 seam 1", True),
        (f"v m served as m fp_1 {HASH}", f"v m served as m fp_1 {OTHER}", False),
        (f"v m served as m fp_1 {HASH} options {HASH}", f"v m served as m fp_1 {HASH} options {OTHER}", False),
        (f"v m served as m fp_1 {HASH}", f"v m served as n fp_1 {HASH}", False),
        (f"v m served as m fp_1 {HASH}", f"w m served as m fp_1 {HASH}", False),
        (f"v m served as m fp_1 {HASH} | v m served as m fp_2 {HASH}", f"v m served as m fp_2 {HASH}", True),
        ("clip a/b fp_1", "clip a/b fp_2", False),
    ],
)
def test_revisions_that_differ_in_fingerprints_alone(one: str, other: str, same: bool) -> None:
    assert (without_fingerprints(one) == without_fingerprints(other)) is same


def test_a_revision_that_was_cut_keeps_everything() -> None:
    revisions = Revisions(["r"])
    for n in range(2):
        revisions.note(f"http://{n}", "r", f"v m served as {', '.join(f'm fp_{n}{i:09d}' for i in range(40))} {HASH}")
    assert without_fingerprints(revisions.told("r")) == revisions.told("r")


# --- checks before anything is sampled ---


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"x": {"scorer": "jpeg_size", "gated_by": "kept_aera"}},
         "rewards.x.gated_by: given 'kept_aera', which is no other reward of the benchmark; did you mean 'kept_area'?"),
        ({"x": {"scorer": "jpeg_size", "gated_by": "y"}, "y": {"scorer": "jpeg_size", "gated_by": "clip"}},
         "rewards.x.gated_by: given 'y', which is gated itself; gate both by 'clip'"),
        ({"pairwise": {"model": "m", "address": "http://127.0.0.1:1/v1"}},
         "rewards.pairwise: compares the samples of a group with each other, but a benchmark scores every image alone"),
    ],
)  # fmt: skip
def test_rewards_are_checked_as_those_of_a_run(
    rewards: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = benchmark("brushbench", tmp_path, rewards=rewards)
    monkeypatch.setattr(RewardTable, "start", None)
    with pytest.raises(ConfigError) as raised:
        run_benchmark(given, {}, [tmp_path], tmp_path / "out")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("kept_area: {gate_floor: -1.0}", "rewards.kept_area.gate_floor: given -1, but gated_by is not set"),
        ("clip: {box_margin: 0.1}", "rewards.clip.box_margin: given 0.1, but crop is 'none'"),
    ],
)
def test_an_option_of_a_reward_that_nothing_reads_is_refused(reward: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"name: brushbench\npath: {tmp_path}\nrewards: {{{reward}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_benchmark(str(file), None)
    assert message in str(raised.value)


def test_a_gate_of_a_benchmark_may_be_gold(tmp_path: Path) -> None:
    benchmark(
        "brushbench", tmp_path, rewards={"clip": {"gated_by": "kept_area"}, "kept_area": {"role": "gold"}}
    ).check_rewards()
