"""Encoded examples: each alone and once, every picture in its role."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from retouch.errors import ImageProblem
from retouch.observe import Stopwatch
from retouch.rollout import encoded
from retouch.rollout.encoded import EncodedData, encoded_ahead
from retouch.types import Condition, Example

from .fakes import FakeModel

CPU = torch.device("cpu")


def red(level: int) -> Image.Image:
    return Image.new("RGB", (12, 8), (level, 0, 0))


EXAMPLES = [
    Example(10, "a", target=red(51), win=red(102), lose=red(153)),
    Example(11, "b", target=red(204)),
]


class Counting(FakeModel):
    """Remembers the ids of every call to encode, and under which guidance."""

    def __init__(self) -> None:
        super().__init__("flow")
        self.encoded: list[tuple[list[int], float]] = []

    def encode(self, examples: Any, guidance_scale: float) -> Any:
        self.encoded.append(([e.id for e in examples], guidance_scale))
        return super().encode(examples, guidance_scale)


@pytest.fixture
def data() -> EncodedData:
    model: Any = Counting()
    examples: Any = EXAMPLES
    return EncodedData(model, examples, 30.0, Stopwatch())


def level(latents: torch.Tensor) -> list[float]:
    """Red level of each picture, from the latents of the fake (its red and green)."""
    return [round((float(row[0].mean()) + 1) * 127.5, 3) for row in latents]


def test_every_picture_comes_in_its_role(data: EncodedData) -> None:
    for role, expected in (("target", 51), ("win", 102), ("lose", 153), ("win", 102)):
        assert level(data.images([0], role, CPU)) == [expected]  # type: ignore[arg-type]
    assert level(data.images([1, 0, 1], "target", CPU)) == [204, 51, 204]


@pytest.mark.parametrize("role", ["win", "lose"])
def test_a_picture_that_is_not_there(role: Any, data: EncodedData) -> None:
    with pytest.raises(ValueError, match=f"example 11 has no {role} image"):
        data.images([0, 1], role, CPU)


def test_conditions_are_encoded_alone_and_once(data: EncodedData) -> None:
    found = data.conditions([1, 0, 1], CPU)
    assert found.tensors["c"].tolist() == [11, 10, 11]
    data.conditions([0], CPU)
    model: Any = data.model
    assert model.encoded == [([11], 30.0), ([10], 30.0)]


def test_text_encoders_are_placed_once_for_all_missing_conditions(data: EncodedData) -> None:
    model: Any = data.model
    inside: list[str] = []

    @contextmanager
    def encoding() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append(f"out after {len(model.encoded)}")

    model.encoding = encoding
    data.conditions([1, 0], CPU)
    assert inside == ["in", "out after 2"]


def test_what_is_encoded_before_is_not_encoded_again(data: EncodedData) -> None:
    data.encode([1, 0], [False, True])
    model: Any = data.model
    before = len(model.encoded)
    data.conditions([1], CPU, [False])
    data.conditions([0], CPU, [True])
    assert (before, len(model.encoded)) == (2, 2)


def test_batches_are_encoded_ahead_in_their_order(data: EncodedData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples at once; a batch that cannot be read is an error after those before it."""
    monkeypatch.setattr(encoded, "AHEAD", 2)
    model: Any = data.model
    seen: list[Any] = []

    def batches() -> Iterator[tuple[str, list[Example]]]:
        yield from (("a", EXAMPLES[:1]), ("b", EXAMPLES[1:]), ("c", EXAMPLES[:1]))
        raise ImageProblem("broken")

    with pytest.raises(ImageProblem, match="broken"):
        for name, condition in encoded_ahead(model, batches(), 2.0, Stopwatch()):
            seen.append((name, condition.tensors["c"].tolist(), len(model.encoded)))
    assert seen == [("a", [10], 2), ("b", [11], 2), ("c", [10], 3)]
    assert [name for name, _ in encoded_ahead(model, [("a", EXAMPLES)], 2.0, Stopwatch())] == ["a"]


def test_tensors_that_shape_inputs_stay_on_the_cpu() -> None:
    tensors = {name: torch.arange(3) for name in ("text", "text_length", "negative_text_length")}
    there = Condition(tensors, torch.zeros(3, 1, 8, 12), (8, 12), frozenset({"text_length"})).to("meta")
    rows = there.select(torch.tensor([2, 0]))
    for made in (there, rows):
        assert {name: t.device.type for name, t in made.tensors.items()} == {
            "text": "meta",
            "text_length": "cpu",
            "negative_text_length": "cpu",
        }
    assert rows.tensors["text_length"].tolist() == [2, 0] and rows.mask is not None and len(rows.mask) == 2


def test_an_uncaptioned_row_has_the_empty_prompt_of_its_family(data: EncodedData) -> None:
    model: Any = data.model
    prompts: list[str] = []
    real = model.encode
    model.encode = lambda examples, scale: prompts.extend(e.prompt for e in examples) or real(examples, scale)
    model.spec = replace(model.spec, empty_prompt="nothing")
    data.conditions([0, 1], CPU, [False, True])
    assert prompts == ["a", "nothing"]


def test_another_guidance_encodes_anew_and_the_same_does_not(data: EncodedData) -> None:
    assert data.guided(30.0) is data
    data.conditions([0], CPU)
    data.guided(1.0).conditions([0], CPU)
    model: Any = data.model
    assert model.encoded == [([10], 30.0), ([10], 1.0)]
    assert level(data.guided(1.0).images([1], "target", CPU)) == [204]


def test_what_does_not_depend_on_guidance_is_read_and_encoded_once(data: EncodedData) -> None:
    reads: list[int] = []
    pictures: list[int] = []
    model: Any = data.model
    encode_images = model.encode_images
    data.data = Reading(EXAMPLES, reads)  # type: ignore[assignment]
    model.encode_images = lambda images: pictures.append(len(images)) or encode_images(images)
    for view in (data, data.guided(1.0), data.guided(2.0)):
        view.conditions([0, 1], CPU)
        view.images([0, 1], "target", CPU)
    assert (reads, pictures) == ([0, 1], [1, 1])


class Reading(list[Example]):
    """Remembers which examples were read."""

    def __init__(self, examples: list[Example], reads: list[int]) -> None:
        super().__init__(examples)
        self.reads = reads

    def __getitem__(self, position: Any) -> Any:
        self.reads.append(position)
        return super().__getitem__(position)


# --- reading ahead ---


class Gated(Reading):
    """Nothing is read while the gate is closed; one example cannot be read."""

    def __init__(self, examples: list[Example]) -> None:
        super().__init__(examples, [])
        self.gate = threading.Event()
        self.gate.set()

    def __getitem__(self, position: Any) -> Any:
        assert self.gate.wait(20)
        if position == 2:
            raise ImageProblem("two.png: damaged image; replace the file")
        return super().__getitem__(position)


@pytest.fixture
def gated(data: EncodedData) -> Gated:
    data.data = gated = Gated([*EXAMPLES, Example(12, "c")])  # type: ignore[assignment]
    return gated


def readers_have_ended(before: set[threading.Thread]) -> bool:
    until = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.005)
    return not set(threading.enumerate()) - before


def test_what_was_read_ahead_is_there_at_once_and_read_once(data: EncodedData, gated: Gated) -> None:
    before = set(threading.enumerate())
    gated.gate.clear()
    data.read_ahead([0, 1, 0])
    assert gated.reads == []
    gated.gate.set()
    assert readers_have_ended(before)
    gated.gate.clear()
    assert level(data.images([1, 0], "target", CPU)) == [204, 51]
    data.read_ahead([1, 0])  # what is held is not read again
    assert not set(threading.enumerate()) - before
    assert sorted(gated.reads) == [0, 1]


def test_what_is_not_there_yet_is_waited_for(data: EncodedData, gated: Gated) -> None:
    gated.gate.clear()
    data.read_ahead([0])
    threading.Timer(0.05, gated.gate.set).start()
    assert data.conditions([0], CPU).tensors["c"].tolist() == [10]
    assert gated.reads == [0]


def test_what_cannot_be_read_is_an_error_where_it_is_used(data: EncodedData, gated: Gated) -> None:
    data.read_ahead([2, 0])
    assert level(data.images([0], "target", CPU)) == [51]
    for _ in range(2):
        with pytest.raises(ImageProblem, match=r"two\.png"):
            data.examples([2])


def test_what_was_read_ahead_for_other_steps_is_forgotten(data: EncodedData, gated: Gated) -> None:
    data.read_ahead([0, 1])
    data.read_ahead([1])
    data.examples([0, 1])
    assert sorted(gated.reads) == [0, 0, 1]
