"""Items, the text to read, and the promise that a scorer, whatever it does, gives one typed outcome an item."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retouch.rewards.addresses import base_url, usable_token
from retouch.rewards.protocol import (
    RewardItem,
    ScorerSpec,
    malformed,
    missing_needs,
    quoted_texts,
    text_to_read,
)
from retouch.types import Failure, Score
from tests.rewards.fakes import (
    Brightness,
    Poisoned,
    Scripted,
    brightness,
    half_mask,
    item,
    items,
    score_checked,
    values,
)

# --- the text to read ---


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('The text is "Ocean".', "Ocean"),
        ("The text is 'Ocean'.", "Ocean"),
        ("The text is 'O'Brien'.", "O'Brien"),
        ("A sign that says 'don't walk'", "don't walk"),
        ("I don't care; it can't say 'Stop' there", "Stop"),
        ("the boys' room says \"Boys' Room\"", "Boys' Room"),
        ("'Tea' then \"Coffee\"", "Coffee"),  # double quotes go first wherever they stand
        ('"One" and "Two"', "One"),
        ("('Open')", "Open"),
        ('"two\nlines"', "two\nlines"),
        ("'two\nlines'", "two\nlines"),
        ("一个写着'HELLO'的牌子", "HELLO"),  # CJK letters are no part of an English word
        ("看板に'東京'と書く", "東京"),
        ('写着"HELLO"的牌子', "HELLO"),
        ('"" and "HELLO"', "HELLO"),
        ("'' and 'HELLO'", "HELLO"),
        ("\"  \", '\t' and 'HELLO'", "HELLO"),
        ("José's dogs' sign says 'Perro'", "Perro"),
    ],
)
def test_text_stands_in_quotes(prompt: str, text: str) -> None:
    assert text_to_read(item(prompt=prompt)) == text


@pytest.mark.parametrize(
    "prompt",
    [
        "no quotes", "don't, won't and can't", "the boys' dogs' bowls", '""', '"  "', "", "it's five o'clock",
        "José's dogs' bowl", "п'ять' м'яч", "''", '"" and " "', "the dogs' bowl\nand the cats' one",
    ],
)  # fmt: skip
def test_no_text_is_a_typed_failure(prompt: str) -> None:
    failure = text_to_read(item(prompt=prompt))
    assert isinstance(failure, Failure) and failure.code == "bad_item" and not failure.retryable
    assert "metadata.text" in failure.message and "quotes" in failure.message


def test_metadata_text_goes_before_the_prompt() -> None:
    assert text_to_read(item(prompt='says "Prompt"', metadata={"text": "Meta"})) == "Meta"


@pytest.mark.parametrize("blank", ["", "  \n", None])
def test_blank_metadata_text_leaves_it_to_the_prompt(blank: str | None) -> None:
    assert text_to_read(item(prompt='says "Prompt"', metadata={"text": blank})) == "Prompt"


@pytest.mark.parametrize("text", [7, 1.5, True, ["A"]])
def test_metadata_text_of_another_type_is_not_passed_over(text: object) -> None:
    failure = text_to_read(item(prompt='says "Prompt"', metadata={"text": text}))
    assert isinstance(failure, Failure) and failure.code == "bad_item" and repr(text) in failure.message


# --- items ---


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": np.zeros((4, 4), np.uint8)}, ["image", "[H, W, 3]", "uint8 (4, 4)"]),
        ({"image": np.zeros((4, 4, 4), np.uint8)}, ["image", "(4, 4, 4)"]),
        ({"image": np.zeros((4, 4, 3), np.float32)}, ["image", "float32"]),
        ({"image": np.zeros((0, 4, 3), np.uint8)}, ["image", "(0, 4, 3)"]),
        ({"image": None}, ["image", "NoneType"]),
        ({"mask": np.zeros((4, 4, 1), np.uint8)}, ["mask", "[H, W]"]),
        ({"mask": np.zeros((4, 4), bool)}, ["mask", "bool"]),
        ({"source": "a.png"}, ["source", "str"]),
        ({"reference": np.zeros((4, 4), np.uint8)}, ["reference"]),
        ({"prompt": 3}, ["prompt", "3"]),
        ({"prompt": "half \ud800"}, ["prompt"]),
        ({"metadata": {"a": math.nan}}, ["metadata"]),
        ({"metadata": {"a": {1, 2}}}, ["metadata"]),
        ({"metadata": {1: "a"}}, ["metadata", "key"]),
    ],
)
def test_malformed_items_say_what_is_wrong(fields: dict[str, Any], words: list[str]) -> None:
    failure = malformed(item(**fields))
    assert failure is not None and failure.code == "bad_item" and not failure.retryable
    assert all(word in failure.message for word in words)


def test_sound_items_are_not_malformed() -> None:
    assert malformed(item()) is None
    full = item(
        mask=half_mask(), source=np.zeros((9, 9, 3), np.uint8), reference=np.zeros((2, 3, 3), np.uint8), group=4,
        metadata={"text": "é", "nested": {"list": [1, 2.5, None]}},
    )  # fmt: skip
    assert malformed(full) is None


def test_a_malformed_item_does_not_reach_the_scorer() -> None:
    scorer = Brightness()
    batch = [item(0), item(1, image=np.zeros((4, 4), np.uint8)), item(2)]
    assert values(score_checked(scorer, batch)) == [brightness(batch[0]), "bad_item", brightness(batch[2])]
    assert [seen.id for seen in scorer.seen] == [0, 2]


# --- needs ---


def test_missing_needs_are_named_and_fail_alone() -> None:
    scorer = Brightness("picky", needs=("mask", "source"))
    whole = item(1, mask=half_mask(), source=np.zeros((6, 5, 3), np.uint8))
    first, second, third = score_checked(scorer, [item(0), whole, item(2, mask=half_mask())])
    assert first == Failure("bad_item", "picky needs mask, source")
    assert second == Score(brightness(whole), {"pixels": 30})
    assert third == Failure("bad_item", "picky needs source")
    assert [seen.id for seen in scorer.seen] == [1]


def test_a_need_that_no_item_has_is_a_failure_too() -> None:
    spec = ScorerSpec("odd", (0.0, 1.0), frozenset({"depth"}), "1", "MIT")
    failure = missing_needs(spec, item())
    assert failure is not None and "depth" in failure.message


# --- totality ---


def test_outcomes_keep_their_order() -> None:
    batch = items(7)
    assert values(score_checked(Brightness(), batch)) == [brightness(one) for one in batch]
    assert score_checked(Brightness(), []) == []


def test_poison_fails_alone() -> None:
    batch = [item(0), item(1, prompt="poison"), item(2, prompt="refused"), item(3)]
    outcomes = score_checked(Poisoned("fragile"), batch)
    assert values(outcomes) == [brightness(batch[0]), "scorer_error", "bad_item", brightness(batch[3])]
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].message.startswith("fragile raised RuntimeError: choked, at fakes.py:")


@pytest.mark.parametrize(
    "script",
    [
        lambda batch: [Score(0.5)] * (len(batch) - 1),
        lambda batch: [Score(0.5)] * (len(batch) + 1),
        lambda batch: [],
        lambda batch: None,
        lambda batch: 0.5,
    ],
    ids=["too few", "too many", "none", "no list", "a number"],
)
def test_a_wrong_count_is_a_failure_of_every_item(script: Any) -> None:
    """A shifted list would give every picture the score of its neighbour."""
    outcomes = score_checked(Scripted(script), items(3))
    assert values(outcomes) == ["scorer_error"] * 3


def test_a_generator_is_as_good_as_a_list() -> None:
    assert values(score_checked(Scripted(lambda batch: (Score(0.5) for _ in batch)), items(3))) == [0.5] * 3


def test_a_generator_that_raises_fails_alone() -> None:
    def scores(batch: Any) -> Any:
        return (Score(float(one.prompt)) for one in batch)

    batch = [item(i, prompt=prompt) for i, prompt in enumerate(("0.1", "poison", "0.3"))]
    assert values(score_checked(Scripted(scores), batch)) == [0.1, "scorer_error", 0.3]


@pytest.mark.parametrize(
    "bad",
    [
        Score(math.nan), Score(math.inf), Score(-math.inf), Score(10**400), Score(True), Score("0.7"), Score(None),
        None, 0.7, "0.7", {"value": 0.7}, Score(np.array([0.5])), Score(0.5, {"confidence": math.nan}),
        Score(0.5, {"pixels": np.zeros(2)}), Score(0.5, {1: "a"}), Score(0.5, None),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_finite_score_is_a_failure_alone(bad: Any) -> None:
    outcomes = score_checked(Scripted(lambda batch: [Score(0.25), bad, Score(0.75)]), items(3))
    assert values(outcomes) == [0.25, "scorer_error", 0.75]


@pytest.mark.parametrize("value", [1e30, -1e30, 1000.1, -1000.1])
def test_a_value_outside_the_declared_range_is_a_failure(value: float) -> None:
    rounded = 1000 * (1 + 1e-9)  # rounding may pass a bound
    outcomes = score_checked(Scripted(lambda batch: [Score(0.25), Score(value), Score(rounded)]), items(3))
    assert values(outcomes) == [0.25, "scorer_error", rounded]
    assert isinstance(outcomes[1], Failure) and "outside its range of -1000 to 1000" in outcomes[1].message


def test_integers_become_floats_and_details_what_json_makes_of_them() -> None:
    (outcome,) = score_checked(Scripted(lambda batch: [Score(1, {"box": (1, 2), "inner": {"a": None}})]), [item()])
    assert isinstance(outcome, Score) and isinstance(outcome.value, float)
    assert outcome == Score(1.0, {"box": [1, 2], "inner": {"a": None}})


def test_a_retryable_failure_of_a_scorer_stays_retryable() -> None:
    given = Failure("overloaded", "later", retryable=True)
    assert score_checked(Scripted(lambda batch: [given]), [item()]) == [given]


def test_items_share_no_metadata() -> None:
    first, second = RewardItem(1, "", item().image), RewardItem(2, "", item().image)
    assert first.metadata is not second.metadata


# --- addresses and tokens ---


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://rewards.example/v1//", "https://rewards.example/v1"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(given: str, address: str) -> None:
    assert base_url(given) == address


@pytest.mark.parametrize(
    "bad", ["", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a b", "http://a:0"]
)
def test_what_is_no_address_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        base_url(bad)


@pytest.mark.parametrize("bad", ["http://me:hunter2@a:1", "http://a:1/?key=hunter2", "http://a:1/#hunter2"])
def test_an_address_with_a_secret_is_refused_without_showing_it(bad: str) -> None:
    with pytest.raises(ValueError, match="a user, a password or a query") as caught:
        base_url(bad)
    assert "hunter2" not in str(caught.value)


def test_tokens() -> None:
    assert usable_token(" secret\n") == "secret"
    for bad in ("", "two words", "new\nline", "schlüssel"):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            usable_token(bad)
        assert not bad or bad not in str(caught.value)


def test_a_message_of_a_scorer_is_one_line_that_can_be_printed() -> None:
    """Half of a surrogate pair made the reply of the server fail; control characters reached the terminal."""

    class Foreign(Brightness):
        def score(self, items: Any) -> Any:
            if items[0].id:
                raise ValueError("\x1b[31m\ud800\nred" + "!" * 5000)
            return [Failure("bad_item", "\udc00\x07" + "?" * 5000)]

    for one in items(2):
        (outcome,) = score_checked(Foreign(), [one])
        assert isinstance(outcome, Failure)
        assert outcome.message.isprintable() and len(outcome.message) < 1100


def test_quotes_are_found_in_time_that_grows_with_the_length_alone() -> None:
    """100,000 quotes that open and never close took minutes."""
    assert quoted_texts(" 'a" * 100_000) == []
    assert quoted_texts(" 'a" * 3 + "'") == ["a 'a 'a"]
