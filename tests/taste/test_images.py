"""Which images are voted on, and what is known about each: of a run, a folder, a list, and `retouch sample`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from PIL import Image

from retouch.config import load_run
from retouch.data.base import DataError, ItemFiles
from retouch.data.dataset import Dataset
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.votes import VotesData
from retouch.data.identity import digest, trained_on
from retouch.imaging.reading import packed
from retouch.taste.choosing import Chooser
from retouch.taste.images import images_to_vote_on
from retouch.taste.votes import Vote, VotedImage, VoteFile, image_digest
from retouch.use.sampling import SAMPLES, inputs_for_votes, list_for_votes


def test_of_a_run_the_images_of_an_example_differ_in_weights_or_in_seed(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    given = run_file()
    (run / "config.yaml").write_text(yaml.safe_dump(given))
    config = load_run(run / "config.yaml")
    from retouch.data.dataset import load_dataset

    data = load_dataset(config.evaluation.data or config.data)
    records = list[dict[str, Any]]()
    for step in (0, 2):
        folder = run / "evaluations" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        rows = [(item.id, index) for item in data.items[:2] for index in range(2)]
        told = [{"example": example, "index": index, "text": "SALE"} for example, index in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        for number in range(3):  # the first ones are kept
            Image.new("RGB", data[0].source.size, (step, number, 9)).save(folder / f"{number:05d}.png")  # type: ignore[union-attr]
        records.append({"kind": "eval", "step": step, "images": 4})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = images_to_vote_on(run, tmp_path / "votes")
    first = data.items[0].id
    assert [image.example for image in found] == [str(first), str(first), str(data.items[1].id)] * 2
    assert {image.weights for image in found} == {"one step 0", "one step 2"}
    one = found[0]
    assert one.prompt == data[0].prompt and one.source is not None and one.mask is not None
    assert np.array_equal(np.asarray(Image.open(one.mask)), np.asarray(data[0].mask))
    # seed 0 with seed 0, seed 1 with seed 1, and both seeds of each step; the other example has two images
    assert Chooser(found, 0, alone=False, informative=None).total() == 4 + 1
    assert isinstance(data.items[0].source_path, Path) and one.original == digest(data.items[0].source_path)
    mask = np.asarray(Image.open(one.mask))
    one.mask.rename(one.mask.with_name("00000-mask-of-another-run.png"))  # another run of the same name
    again = images_to_vote_on(run, tmp_path / "votes")[0].mask
    assert again is not None and np.array_equal(np.asarray(Image.open(again)), mask)


def test_a_run_that_evaluated_each_vote_is_read(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As earlier versions did, by an id of its own."""
    images = list[VotedImage]()
    for number in range(2):
        Image.new("RGB", (64, 32), (number, 0, 0)).save(tmp_path / f"{number}.png")
        images.append(VotedImage(tmp_path / f"{number}.png", image_digest(tmp_path / f"{number}.png"), "0", "a sign"))
    votes = VoteFile(tmp_path / "votes.jsonl")
    for answer in ("left", "right"):
        votes.add(Vote(0, "ann", answer, images[0], images[1]))
    about = {"format": "votes", "path": str(votes.path), "votes_as": "labels"}
    folder = tmp_path / "runs" / "evaluations" / "step-000000"
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "config.yaml").write_text(yaml.safe_dump(run_file(evaluation__data=about)))
    of_votes = cast("list[ItemFiles]", VotesData.model_validate(about).list_items())
    ids = [of_votes[0].id, of_votes[-1].id, VotesData.model_validate(about).each_once(of_votes)[0].id]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"example": one, "index": 0}) + "\n" for one in ids))
    for number in range(3):
        Image.new("RGB", (64, 32), (0, number, 0)).save(folder / f"{number:05d}.png")
    (tmp_path / "runs" / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 0, "images": 3}) + "\n")
    found = images_to_vote_on(tmp_path / "runs", tmp_path / "again")
    assert [(one.example, one.prompt) for one in found] == [(str(one), "a sign") for one in ids]


def test_a_mask_of_another_size_than_its_image_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    Image.new("L", (20, 24)).save(tmp_path / "mask.png")
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": "a.png", "mask": "mask.png"}))
    with pytest.raises(DataError, match="is 20 x 24, the image 40 x 24"):
        images_to_vote_on(tmp_path / "list.jsonl", tmp_path)


def test_an_example_of_a_list_may_be_null_or_0(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "sign-1.png")
    names = {"absent": "sign", "null": "sign", "zero": "0"}
    for name, example in {"absent": {}, "null": {"example": None}, "zero": {"example": 0}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"image": "sign-1.png", **example}) + "\n")
        [found] = images_to_vote_on(tmp_path / f"{name}.jsonl", tmp_path)
        assert found.example == names[name]


def test_a_mask_and_a_caption_in_a_folder_belong_to_their_image(tmp_path: Path) -> None:
    """As `retouch init` reads them: nobody votes on a mask, and an image that only has the name of one is an image."""
    for level, name in enumerate(("a-0", "a-1", "a-1_mask", "face_mask")):
        Image.new("RGB", (4, 4), (level, 0, 0)).save(tmp_path / f"{name}.png")
    (tmp_path / "a-1.txt").write_text("a sign\n")
    first, second, photograph = images_to_vote_on(tmp_path, tmp_path)
    assert (first.example, first.mask, first.prompt) == ("a", None, "")
    assert (second.example, second.mask, second.prompt) == ("a", tmp_path / "a-1_mask.png", "a sign")
    assert photograph.image.name == "face_mask.png"
    for part in ("images", "masks"):
        (tmp_path / "parts" / part).mkdir(parents=True)
        Image.new("RGB", (4, 4), "red" if part == "masks" else "blue").save(tmp_path / "parts" / part / "a.png")
    assert [image.image.parent.name for image in images_to_vote_on(tmp_path / "parts", tmp_path)] == ["images"]


def white_left(tmp_path: Path) -> tuple[Image.Image, Path]:
    """A mask whose left half is repainted, and a file of the opposite."""
    levels = np.zeros((24, 40), np.uint8)
    levels[:, :20] = 255
    path = tmp_path / "inverted.png"
    Image.fromarray(255 - levels).save(path)
    return Image.fromarray(levels), path


@pytest.mark.parametrize("kind", ["inverted", "packed"])
def test_a_sample_is_listed_with_a_mask_that_is_white_where_it_was_repainted(kind: str, tmp_path: Path) -> None:
    mask, inverted = white_left(tmp_path)
    source = tmp_path / "photo.png"
    Image.new("RGB", mask.size, "red").save(source)
    section = ManifestData(path="", resolution=(24, 40), invert_mask=kind == "inverted")
    item = ItemFiles(0, "a sign", source, inverted if kind == "inverted" else packed(mask, "--box"))
    trained = cast("Any", SimpleNamespace(newest=None, config=SimpleNamespace(name="run")))
    Image.new("RGB", mask.size, "blue").save(tmp_path / "out.png")
    for one in (item, replace(item, prompt="another sign")):  # --image and --prompt, twice into one folder
        list_for_votes(tmp_path, tmp_path / "out.png", one, inputs_for_votes(tmp_path, one, section), trained, 7)
    first, second = images_to_vote_on(tmp_path, tmp_path)
    assert first.mask is not None and np.array_equal(np.asarray(Image.open(first.mask)), np.asarray(mask))
    assert first.source == source and first.weights == "base" and first.seed == 7
    assert first.example != second.example  # both have the id 0
    assert (tmp_path / SAMPLES).is_file()


def test_a_sample_without_a_mask_is_listed_with_a_source_of_its_size(tmp_path: Path) -> None:
    """Votes on samples of a held-out image are held-out images in training: the list names the original."""
    source, other = tmp_path / "photo.png", tmp_path / "other.png"
    for path, colour in ((source, "red"), (other, "blue")):
        Image.new("RGB", (400, 240), colour).save(path)
    section, item = ManifestData(path="", resolution=(24, 40)), ItemFiles(0, "make it red", source)
    inputs = inputs_for_votes(tmp_path, item, section)
    with Image.open(inputs["source"]) as shown:
        assert shown.size == (40, 24)
    Image.new("RGB", (40, 24)).save(tmp_path / "out.png")
    trained = cast("Any", SimpleNamespace(newest=None, config=SimpleNamespace(name="run")))
    list_for_votes(tmp_path, tmp_path / "out.png", item, inputs, trained, 7)
    [image] = images_to_vote_on(tmp_path, tmp_path)
    file = VoteFile(tmp_path / "votes.jsonl")
    file.add(Vote(0, "ann", "left", image, image))
    votes = VotesData(path=str(file.path))
    training = Dataset(votes, [one for one in votes.list_items() if isinstance(one, ItemFiles)])
    held_out = Dataset(section, [item, ItemFiles(1, "make it red", other)])
    assert trained_on(held_out, training) == [item]
    assert len(trained_on(training, held_out)) == 1 and not trained_on(training, Dataset(section, held_out.items[1:]))
