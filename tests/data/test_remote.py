"""Data at a commit: what a path names, and its download by the real libraries from servers on 127.0.0.1."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants as constants
import pytest
from pydantic import ValidationError

from retouch.config import RunConfig
from retouch.data import remote
from retouch.data.base import DataError, DataSection
from retouch.data.dataset import load_dataset
from retouch.data.formats.calligrapher import SelfBenchData
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.data.remote import Pinned, cached_path, local_path, pinned
from retouch.files import hub
from retouch.use.overlap import seen_in_training
from retouch_bench.formats.gedit import GEditData
from retouch_bench.formats.imgedit import ImgEditData
from tests.command_line import retouch
from tests.data.hub_stub import COMMIT, HubStub

SET = f"hf://datasets/some/set@{COMMIT}"
REPOSITORY = f"github://some/code@{COMMIT}"
PROMPTS = b"a cat\n\na sign that says 'MOON'\n"
FILES = {
    "train.txt": PROMPTS,
    "lists/metadata.jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n',
    "lists/more/unread.txt": b"no",
    "other/large.txt": b"not of this folder",
}


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty ones -> that of the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    remote.resolved.cache_clear()
    return tmp_path / "hub"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """The data set some/set, whose address the libraries take in this process."""
    with HubStub("some/set", FILES) as stub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, stub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        yield stub


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers."""
    monkeypatch.setattr(remote, "hub_problem", lambda: "http://127.0.0.1:9: refused")
    monkeypatch.setenv("RETOUCH_GITHUB_RAW", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{SET}/a/b.txt", Pinned("hf", "some/set", COMMIT, "a/b.txt")),
        (SET, Pinned("hf", "some/set", COMMIT, "")),
        (f"{REPOSITORY}/a/b.txt", Pinned("github", "some/code", COMMIT, "a/b.txt")),
        ("some/set", None),
        ("folder/list.txt", None),
        ("~/hf/list.txt", None),
    ],
)
def test_what_a_path_names(path: str, expected: Pinned | None) -> None:
    assert pinned(path) == expected
    assert pinned(str(Path(path))) == expected  # an option of the command line has lost a slash
    assert expected is None or str(expected) == path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/some/set/train.txt", "expected hf://datasets/OWNER/NAME@COMMIT/FILE with a commit of 40 hexad"),
        ("hf://datasets/some/set@main/train.txt", "because branches and tags can move; write the commit"),
        (f"hf://datasets/some/set@{COMMIT[:-1]}/train.txt", "commit of 40 hexadecimal digits"),
        (f"hf://some/model@{COMMIT}/train.txt", "expected hf://datasets/OWNER/NAME@COMMIT/FILE"),
        (f"{SET}/../../other.txt", "expected hf://datasets/OWNER/NAME@COMMIT/FILE"),
        (f"hf://datasets/../set@{COMMIT}/a.txt", "expected hf://datasets/OWNER/NAME@COMMIT/FILE"),
        ("github://some/code@v1/train.txt", "expected github://OWNER/NAME@COMMIT/FILE"),
        (f"{REPOSITORY}/dataset", "names no file; write a file of the commit, or clone the repository"),
    ],
)
def test_an_incomplete_path_is_an_error_of_the_run_file(path: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptsData(path=path)
    with pytest.raises(DataError, match=message):
        local_path(path)


def test_a_file_of_the_hub_is_downloaded_once(served: HubStub) -> None:
    section = PromptsData(path=f"{SET}/train.txt")
    for asked in (1, 0):
        served.asked.clear()
        remote.resolved.cache_clear()  # another process
        found = load_dataset(section)
        assert [(e.id, e.prompt) for e in found] == [(0, "a cat"), (2, "a sign that says 'MOON'")]
        assert sum(method == "GET" and path.endswith("/train.txt") for method, path in served.asked) == asked
        assert asked or not served.asked  # the commit says that nothing can have changed


def test_a_folder_of_the_hub(served: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files below it and no others; without a hub, what was downloaded before."""
    section = ManifestData(path=f"{SET}/lists", target="none")
    assert [e.prompt for e in load_dataset(section)] == ["a", "b"]
    folder = local_path(f"{SET}/lists/")
    assert (folder / "more/unread.txt").is_file() and not (folder.parent / "other").exists()
    monkeypatch.setattr(remote, "hub_problem", lambda: "refused")
    remote.resolved.cache_clear()
    served.asked.clear()
    assert local_path(f"{SET}/lists") == folder and not served.asked


def test_a_part_of_a_folder_is_not_taken_for_all_of_it(
    served: HubStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a download of one file without the others, the cache has a folder, and no list of its files."""
    local_path(f"{SET}/lists/metadata.jsonl")
    assert cached_path(f"{SET}/lists") is None and cached_path(f"{SET}/lists/metadata.jsonl") is not None
    with monkeypatch.context() as offline:
        offline.setattr(remote, "hub_problem", lambda: "refused")
        assert not (local_path(f"{SET}/lists") / "more").exists()
    assert "the cache holds some of its files, perhaps not all" in caplog.text
    caplog.clear()
    remote.resolved.cache_clear()
    assert (local_path(f"{SET}/lists") / "more/unread.txt").is_file() and not caplog.text


def test_a_process_asks_for_a_folder_once(served: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many items read it; what failed is tried again."""
    lines = b"\n".join(b"%d-WORD" % n for n in range(5))
    monkeypatch.setattr(served, "files", {"bench/self_bench.txt": lines})
    asked: list[str] = []
    snapshot = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **b: asked.append(a[0]) or snapshot(*a, **b))
    assert len(SelfBenchData(path=f"{SET}/bench").list_items()) == 5
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(DataError, match="has no such folder"):
            local_path(f"{SET}/nothing")
    assert len(asked) == 3


def test_what_was_downloaded_is_found_without_a_download(served: HubStub, raw: HubStub) -> None:
    paths = [f"{SET}/lists", f"{SET}/train.txt", f"{REPOSITORY}/a b/train.txt"]
    assert [cached_path(path) for path in paths] == [None] * 3
    assert not served.asked and not raw.asked
    places = [local_path(path) for path in paths]
    served.asked.clear()
    raw.asked.clear()
    assert [cached_path(path) for path in paths] == places
    assert cached_path(f"{SET}/other") is None  # of another folder, nothing was downloaded
    assert not served.asked and not raw.asked
    assert cached_path("nowhere") is None and cached_path(".") == Path()


def test_evaluation_data_is_compared_with_downloaded_training_data(
    served: HubStub, config: Callable[..., RunConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a list on this machine; what was not downloaded is unknown."""
    given = {"format": "prompts", "path": f"{SET}/train.txt"}
    run = config(model__family="qwen_image", data=given, rewards={"clip": {}})
    (tmp_path / "own.txt").write_text("a cat\na dog\n", encoding="utf-8")
    section = PromptsData(path=str(tmp_path / "own.txt"))

    def warned() -> str:
        caplog.clear()
        seen_in_training(run, load_dataset(section), "--data")
        return caplog.text

    assert "data.path has no images on this machine" in warned() and not served.asked
    local_path(f"{SET}/train.txt")
    told = warned()
    assert "trained on 1 of 2 examples (the first: item 0)" in told and "unknown" not in told


@pytest.mark.parametrize(("section", "key"), [(ManifestData, "image_root"), (ImgEditData, "images")])
@pytest.mark.usefixtures("away")
def test_the_folder_of_the_images_is_checked_as_the_path(section: type[DataSection], key: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=rf"{key}\n.*commit of 40 hexadecimal digits"):
        section.model_validate({"path": "x", key: "hf://datasets/some/set@main/images"})
    file = tmp_path / ("basic_edit.json" if key == "images" else "m.jsonl")
    file.write_text('{"prompt": "a"}', encoding="utf-8")
    with pytest.raises(DataError, match=rf"^data\.{key}: {SET}/images cannot be loaded from the hub"):
        section.model_validate({"path": str(file), key: f"{SET}/images"}).list_items()


def test_a_download_is_not_divided(served: HubStub, caches: Path) -> None:
    """No list is written into the cache."""
    outcome = retouch("data", "split", f"{SET}/train.txt", "--share", "0.5")
    assert outcome.code == 2 and outcome.err.endswith("nothing is written; copy the list to a folder first\n")
    assert not served.asked and not caches.exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{SET}/nothing.txt", rf"data\.path: {SET}/nothing\.txt cannot be loaded from the hub: 404 .*Entry Not Found"),
        (f"{SET}/nothing", rf"data\.path: given '{SET}/nothing'; the commit has no such folder; write one of its"),
        (
            f"hf://datasets/some/set@{COMMIT[::-1]}/train.txt",
            r"cannot be loaded from the hub: 404 .*Revision Not Found",
        ),
        (f"hf://datasets/no/set@{COMMIT}/train.txt", r"cannot be loaded from the hub: 40.*Repository Not Found"),
    ],
)
def test_what_the_hub_does_not_have(served: HubStub, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptsData(path=path).list_items()


@pytest.mark.usefixtures("away")
def test_without_a_hub_the_cache_is_read(caches: Path) -> None:
    """In the layout of huggingface_hub."""
    with pytest.raises(
        DataError, match=r"given '.*train\.txt', which was not downloaded, and the hub cannot be reached"
    ):
        local_path(f"{SET}/train.txt")
    with pytest.raises(DataError, match="cannot be loaded from the hub"):
        local_path(f"{SET}/lists")
    snapshot = caches / "datasets--some--set" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "train.txt").write_bytes(PROMPTS)
    assert len(load_dataset(PromptsData(path=f"{SET}/train.txt"))) == 2


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """A server of the files of GitHub: that of the hub has another address for each."""
    with HubStub(
        "some/code", {"a b/train.txt": PROMPTS, "lfs.txt": b"version https://git-lfs.github.com/spec/v1\n"}
    ) as s:
        head = f"/datasets/some/code/resolve/{COMMIT}/"
        monkeypatch.setattr(s, "_file", lambda path: s.files.get(path.removeprefix(f"/some/code/{COMMIT}/")))
        assert head not in s.files
        monkeypatch.setenv("RETOUCH_GITHUB_RAW", s.url + "/")
        yield s


def test_a_file_of_github_is_downloaded_once(raw: HubStub, tmp_path: Path) -> None:
    section = PromptsData(path=f"{REPOSITORY}/a b/train.txt")
    for _ in range(2):
        assert [e.prompt for e in load_dataset(section)] == ["a cat", "a sign that says 'MOON'"]
    assert raw.asked == [("GET", f"/some/code/{COMMIT}/a b/train.txt")]
    place = tmp_path / "cache/retouch/data/github/some/code" / COMMIT / "a b"
    assert [file.name for file in place.iterdir()] == ["train.txt"]


def test_what_github_does_not_have(raw: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (
        (
            "no.txt",
            r"given 'github://some/code@.*/no\.txt', which cannot be downloaded: .*404.*; set data\.path to a file",
        ),
        ("lfs.txt", "is a pointer to a file in Git LFS; clone the repository"),
    ):
        with pytest.raises(DataError, match=message):
            local_path(f"{REPOSITORY}/{path}")
    monkeypatch.setattr(remote, "LARGEST", 4)
    with pytest.raises(DataError, match="more than 0 MiB; download it"):
        local_path(f"{REPOSITORY}/a b/train.txt")


@pytest.mark.usefixtures("away")
def test_without_github_the_error_names_it() -> None:
    with pytest.raises(DataError, match=r"which cannot be downloaded: .*refused"):
        local_path(f"{REPOSITORY}/train.txt")


def table(**columns: list[Any]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), out)
    return out.getvalue()


def in_a_new_process(stub: HubStub, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """With the address of the hub in the environment, as a user gives it."""
    env = {**os.environ, "HF_ENDPOINT": stub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=300)


def test_the_command_line_downloads_a_table_of_prompts(tmp_path: Path) -> None:
    """And reads its column: a published set has images and ids of other kinds beside it."""
    rows = table(caption=["a cat", "a dog", ""], uid=["x", "y", "z"], id=["a", "b", "c"], jpg=[b"1", b"2", b"3"])
    with HubStub("some/set", {"data/train.parquet": rows}) as stub:
        run = tmp_path / "run.yaml"
        run.write_text(
            "name: t\nmodel: {family: sd3}\nalgorithm: {name: grpo}\nrewards: {jpeg_size: {}}\n"
            f"data: {{format: prompts, path: '{SET}/data/train.parquet', prompt_key: caption}}\n",
            encoding="utf-8",
        )
        done = in_a_new_process(stub, tmp_path / "home", "-m", "retouch", "data", "validate", str(run))
        stub.asked.clear()
        checked = in_a_new_process(stub, tmp_path / "other", "-m", "retouch", "check", str(run), "rewards={ocr: {}}")
        assert (checked.returncode, stub.asked) == (0, []), checked.stderr
    assert done.returncode == 2 and "2 items can be used" in done.stdout, done.stderr
    assert "caption missing or empty" in done.stdout


def test_datasets_reads_a_configuration_at_the_commit(tmp_path: Path) -> None:
    """A format that reads splits, by the real library."""
    pytest.importorskip("datasets")
    rows = table(Education=["PhD"], Discipline=["Math"], prompt=["a graph"], Knowledge_Graph=["{}"], key=["1"])
    code = f"""
from retouch.data.formats.mmmg import MmmgData
section = MmmgData(path={SET!r}, levels="PhD", disciplines="Math")
assert section.hub_id == "some/set"
print([item.prompt for item in section.list_items()])
"""
    files = b"  data_files:\n  - split: test\n    path: PhD_Math/test.parquet\n"
    card = b"---\nconfigs:\n- config_name: PhD_Math\n" + files + b"---\n"
    with HubStub("some/set", {"README.md": card, "PhD_Math/test.parquet": rows}) as stub:
        done = in_a_new_process(stub, tmp_path / "home", "-c", code)
    assert done.stdout == "['a graph']\n", done.stderr
    assert any(path.endswith(f"/resolve/{COMMIT}/PhD_Math/test.parquet") for _, path in stub.asked)
    assert all(COMMIT in path for _, path in stub.asked if "some/set" in path)


def test_a_protocol_at_a_commit_is_that_of_the_hub_or_a_folder() -> None:
    assert GEditData(path=SET).hub_id == "some/set"
    assert GEditData(path=f"{SET}/data").hub_id is None  # downloaded, and read as a folder
    assert GEditData(path="some/set").hub_id == "some/set"


def test_the_probe_is_not_asked_for_a_cached_file(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = caches / "datasets--some--set" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "train.txt").write_bytes(PROMPTS)
    monkeypatch.setattr(hub, "_probe", lambda *given: pytest.fail("asked"))
    assert local_path(f"{SET}/train.txt").read_bytes() == PROMPTS
