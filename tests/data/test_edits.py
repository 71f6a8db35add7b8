"""The tiny editing task: what a program sees of colours, and which instructions are in which half."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.algorithms.vlm_grpo.responses import chat_messages, model_inputs, prepare_processor, tokenize
from retouch.data.dataset import load_dataset
from retouch.data.formats.manifest import ManifestData
from retouch.families.loading import component_path, load_component
from retouch.families.qwen.text import ImageTextProcessor
from retouch.files.model_files import tiny_path
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.fn import FnReward
from retouch.tiny.editing import likeliest
from retouch.tiny.edits import (
    COLOURS,
    GROUND,
    PHRASES,
    SIDE,
    THINGS,
    colour_share,
    instructions,
    recoloured,
    write_edits,
)
from tests.command_line import retouch


def page(rows: list[str]) -> np.ndarray:
    """Pixels of a colour for each letter; "." is the ground."""
    palette = {name[0]: rgb for name, rgb in COLOURS.items()} | {".": GROUND}
    return np.array([[palette[letter] for letter in row] for row in rows], np.uint8)


MASK = np.array([[0, 0, 0, 0], [0, 255, 255, 0], [0, 255, 255, 0], [0, 0, 0, 0]], np.uint8)


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        (["....", ".rr.", ".rr.", "...."], 1.0),
        (["....", ".rg.", ".br.", "...."], 0.5),
        (["....", ".y..", ".r..", "...."], 0.25),  # bare ground is no colour
        (["rrrr", "rggr", "rggr", "rrrr"], 0.0),  # outside of the shape nothing counts
    ],
)
def test_the_share_of_a_shape_in_a_colour(rows: list[str], share: float) -> None:
    assert colour_share(page(rows), MASK, "red") == share


def test_a_pixel_has_the_nearest_colour() -> None:
    """Paler than the palette it still counts; nearer to the ground than to any colour it has none."""
    for colour in COLOURS:
        full = page([4 * colour[0]] * 4).astype(np.float32)
        for part, shares in ((0.3, 1.0), (0.7, 0.0)):
            mixed = ((1 - part) * full + part * np.array(GROUND)).astype(np.uint8)
            assert colour_share(mixed, MASK, colour) == shares
            assert sum(colour_share(mixed, MASK, other) for other in COLOURS) == shares


def test_the_reward_asks_for_the_colour_of_each_item() -> None:
    picture = page(["....", ".rr.", ".rg.", "...."])
    items = [
        RewardItem(
            id=i, prompt="like a lemon", image=picture, mask=MASK, source=None, reference=None, group=i,
            metadata={"colour": colour},
        )
        for i, colour in enumerate(("red", "green", "yellow"))
    ]  # fmt: skip
    assert recoloured(items) == [0.75, 0.25, 0.0]


def test_run_files_may_name_its_former_module() -> None:
    assert FnReward.model_validate({"fn": "retouch.data.edits:recoloured"}).fn == "retouch.tiny.edits:recoloured"


def test_the_halves_share_things_and_phrases_but_no_combination() -> None:
    train, held_out = set(instructions("train")), set(instructions("held_out"))
    assert not train & held_out
    assert len(train | held_out) == len(THINGS) * len(PHRASES)
    for half in (train, held_out):
        assert {thing for thing, _ in half} == set(THINGS)
        assert {phrase for _, phrase in half} == set(PHRASES)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """As a manifest: pictures of one shape on the ground, in another colour than the instruction asks for, and only
    instructions of the half; the same bytes from the same seed."""
    for name in ("one", "two"):
        assert write_edits(tmp_path / name, 24, "held_out", 5) == 24
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert len(files) == 2 * 24 + 1
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    data = load_dataset(ManifestData(format="manifest", path=str(tmp_path / "one/manifest.json"), resolution=SIDE))
    meant = {phrase.format(thing): THINGS[thing] for thing, phrase in instructions("held_out")}
    assert len(data) == 24
    for example in data:
        assert example.source is not None and example.mask is not None
        source, mask = np.asarray(example.source), np.asarray(example.mask)
        colour = str(example.metadata["colour"])
        assert meant[example.prompt] == colour
        assert sum(colour_share(source, mask, other) == 1 for other in COLOURS if other != colour) == 1
        assert (source[mask < 128] == GROUND).all()


def test_another_seed_or_half_is_another_set(tmp_path: Path) -> None:
    for half, seed in (("train", 1), ("train", 2), ("held_out", 1)):
        write_edits(tmp_path / f"{half}{seed}", 8, half, seed)
    told = [[e["prompt"] for e in json.loads(file.read_text())] for file in sorted(tmp_path.glob("*/manifest.json"))]
    assert len({tuple(prompts) for prompts in told}) == 3


@pytest.mark.skipif(not tiny_path("qwen_image_edit").is_dir(), reason="needs the trained tiny base")
def test_an_existing_data_set_stays(tmp_path: Path) -> None:
    write_edits(tmp_path / "x", 2, "train", 1)
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    outcome = retouch("data", "edits", "--out", tmp_path / "x", "--count", 3)
    assert outcome.code == 2
    assert outcome.err == f"error: {tmp_path}/x already holds a data set; choose another --out, or delete it\n"
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before


def test_the_base_has_a_wrong_favourite_for_half_of_the_things() -> None:
    """The colour that the packaged base's first letter leans to, over all phrases and three sources."""
    path = component_path("tiny", "qwen_image_edit")
    processor = load_component(ImageTextProcessor, path, "processor", None)
    prepare_processor(processor)
    policy = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", torch.float32).eval()
    starts = [processor.tokenizer(colour[0]).input_ids[0] for colour in COLOURS]
    favourites: dict[str, str] = {}
    for thing in THINGS:
        chats = [chat_messages("edit", phrase.format(thing)) for phrase in PHRASES]
        source = Image.new("RGB", (SIDE, SIDE), GROUND)
        responses = tokenize(processor, "edit", chats, [[source]] * len(chats))
        with torch.no_grad():
            logits = policy(**model_inputs(responses, processor.tokenizer.pad_token_id)).logits[:, -1, starts]
        favourites[thing] = list(COLOURS)[int(logits.softmax(-1).mean(0).argmax())]
    assert favourites == {thing: likeliest(thing) for thing in THINGS}
    assert sum(favourites[thing] != colour for thing, colour in THINGS.items()) == len(THINGS) // 2
