"""Letters with defects, and the recipe of the network that tells them from whole ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from retouch.errors import FontsMissing
from retouch.files.saved_tensors import load_frozen
from retouch.tiny.training import CARD
from retouch_glyphs.glyph_structure import FOLDERS, LETTERS, WEIGHTS, GlyphNetwork, Variant, packaged
from retouch_glyphs.tiny import broken_letters as drawing
from retouch_glyphs.tiny.broken_letters import CAP, STRUCTURAL, TEST_FONTS, TRAIN_FONTS, broken_ink, draw_pair
from retouch_glyphs.tiny.glyph_structure import (
    SHARES,
    RobustTraining,
    StructureTraining,
    attack,
    attacked_probabilities,
    auc,
    aucs,
    broken_probabilities,
    build_structure,
    held_out_letters,
    tensors_of,
    train,
)

FONTS = ["FredokaOne", "Caladea"]
CARDS: dict[Variant, dict[str, Any]] = {
    variant: json.loads((folder / CARD).read_text(encoding="utf-8")) for variant, folder in FOLDERS.items()
}


@pytest.mark.parametrize("defect", STRUCTURAL)
def test_a_pair_differs_in_its_defect_alone(defect: str) -> None:
    whole, broken = draw_pair(FONTS, 3, {defect: 1.0}, drawing.LetterSetting(alone=True, heights=(32, 32), lowest=None))
    assert (whole.asked, whole.font, whole.defect, broken.defect) == (broken.asked, broken.font, None, defect)
    assert whole.pixels.shape == broken.pixels.shape
    changed = np.abs(whole.pixels.astype(int) - broken.pixels).max(2) > 0
    assert 0 < changed.mean() < 0.9
    again = draw_pair(FONTS, 3, {defect: 1.0}, drawing.LetterSetting(alone=True, heights=(32, 32), lowest=None))
    assert np.array_equal(again[1].pixels, broken.pixels)


def test_strokes_are_only_taken_away_or_added() -> None:
    ink = drawing._written(drawing.face("FredokaOne"), "R", drawing._CENTRE)
    other = drawing._written(drawing.face("FredokaOne"), "W", drawing._CENTRE)
    for seed in range(8):
        draw = np.random.default_rng(seed)
        erased, added = (broken_ink(draw, ink, defect, lambda: other) for defect in ("erase", "add"))
        assert (erased <= ink).all() and (added >= ink).all()
        assert erased.sum() < ink.sum() < added.sum() < ink.sum() + 0.6 * 0.14 * CAP**2 * 1.5
        spliced = broken_ink(draw, ink, "splice", lambda: other)
        rows = [np.array_equal(spliced[y], ink[y]) or np.array_equal(spliced[y], other[y]) for y in range(len(ink))]
        assert all(rows) and not np.array_equal(spliced, ink)
        warped = broken_ink(draw, ink, "warp", lambda: other)
        assert 0.6 < warped.sum() / ink.sum() < 1.6 and np.abs(warped - ink).sum() > 0.1 * ink.sum()


def test_a_change_of_less_than_a_hundredth_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defects that change nothing are drawn again, here until there is one that does."""
    tried: list[int] = []

    def nearly(draw: Any, ink: Any, defect: str, other: Any) -> Any:
        tried.append(1)
        changed = ink.copy()
        rows, columns = np.nonzero(ink > 0.9)
        count = int((0.005 if len(tried) < 8 else 0.05) * ink.sum())
        changed[rows[:count], columns[:count]] = 0
        return changed

    monkeypatch.setattr(drawing, "broken_ink", nearly)
    draw_pair(FONTS, 0, {"erase": 1.0}, drawing.LetterSetting(alone=True))
    assert len(tried) == 8


@pytest.mark.parametrize("defect", ["nothing", "other", "erase"])
def test_an_empty_box_of_a_thin_letter_is_drawn_again(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = drawing._box, list[int]()

    def box(*given: Any) -> tuple[int, int, int, int]:
        calls.append(1)
        found = real(*given)
        return (found[2], found[1], found[2], found[3]) if len(calls) == 1 else found

    monkeypatch.setattr(drawing, "_box", box)
    shapes = list[tuple[int, ...]]()
    shown = drawing.shown
    monkeypatch.setattr(
        drawing, "shown", lambda draw, ink, height: shapes.append(ink.shape) or shown(draw, ink, height)
    )
    draw_pair(FONTS, 3, {defect: 1.0})
    assert len(calls) > 1 and len(shapes) == 2 and min(min(shape) for shape in shapes) > 0


def test_letters_of_one_shape_are_not_put_together() -> None:
    for a, b in ("Il", "l1", "I1", "O0", "oO", "cC", "B8"):
        assert drawing.same_shape(a, b)
    assert not drawing.same_shape("A", "B")
    draw = np.random.default_rng(0)
    assert not {drawing._unlike(draw, "FredokaOne", "l") for _ in range(400)} & set("Il1")
    assert not {c for c in drawing.alphabet_of("AmaticSC") if c.islower()}


def test_no_family_is_trained_on_and_tested_with() -> None:
    assert not {*TRAIN_FONTS} & {*TEST_FONTS}
    for card in CARDS.values():
        assert card["fonts"] == {"train": drawing.names_of(TRAIN_FONTS), "test": drawing.names_of(TEST_FONTS)}


def test_a_missing_font_names_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(FontsMissing, match=r"SourceSansPro is not installed: pip install .retouch\[train,fonts\]"):
        drawing._sized("SourceSansPro", 20)


def test_areas_by_hand() -> None:
    assert auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == pytest.approx(3.5 / 4)
    letters = [drawing.Letter(np.zeros((1, 1, 3), np.uint8), 0, d, "") for d in (None, "erase", None, "add")]
    assert aucs(letters, np.array([0.1, 0.9, 0.5, 0.3])) == {"add": 0.5, "all": 0.75, "erase": 1.0}


@pytest.mark.full
@pytest.mark.parametrize("recipe", [StructureTraining, RobustTraining])
def test_the_recipe_writes_the_same_network_again(recipe: type[StructureTraining], tmp_path: Path) -> None:
    training = recipe(letters=16, epochs=2, batch=8, test_letters=8)
    for name in "ab":
        found = build_structure(tmp_path / name, 5, training, FONTS)
    assert {*found["auc"]["letters of test fonts"]} >= {"all"} and found["fonts"]["train"] == FONTS
    assert ("auc under attack" in found) == (recipe is RobustTraining)
    files = [(tmp_path / name / WEIGHTS).read_bytes() for name in "ab"]
    assert files[0] == files[1] and len(files[0]) < 600_000
    assert (tmp_path / "a" / CARD).read_text() == (tmp_path / "b" / CARD).read_text()
    built, ours = (load_file(folder / WEIGHTS) for folder in (tmp_path / "a", FOLDERS["standard"]))
    assert {k: v.shape for k, v in built.items()} == {k: v.shape for k, v in ours.items()}
    load_frozen(GlyphNetwork, tmp_path / "a" / WEIGHTS)


@pytest.mark.parametrize(("variant", "area"), [("standard", 0.93), ("robust", 0.90)])
def test_the_packaged_networks_tell_broken_letters_of_unseen_fonts(variant: Variant, area: float) -> None:
    """160 letters; the card has 1000."""
    letters = held_out_letters(160, seed=7)
    assert {LETTERS[letter.asked] for letter in letters} > set("AEIOU")
    assert aucs(letters, broken_probabilities(packaged(variant=variant), letters))["all"] > area


@pytest.mark.full
@pytest.mark.parametrize(("variant", "area"), [("standard", 0.93), ("robust", 0.92)])
def test_the_card_has_what_the_packaged_network_does(variant: Variant, area: float) -> None:
    card = CARDS[variant]
    letters = held_out_letters(card["training"]["test_letters"], card["seed"])
    found = aucs(letters, broken_probabilities(packaged(variant=variant), letters))
    for name, value in card["auc"]["letters of test fonts"].items():
        assert found[name] == pytest.approx(value, abs=0.01)  # another FreeType renders other pixels
    assert found["all"] >= area
    assert card["defects"] == SHARES
    for attacked, value in card.get("auc under attack", {}).items():
        probabilities = attacked_probabilities(packaged(variant=attacked), letters, card["training"]["epsilon"])
        assert aucs(letters, probabilities)["all"] == pytest.approx(value, abs=0.02)


def test_an_attack_raises_the_loss_within_its_norm() -> None:
    network = packaged()
    pixels, asked, broken = tensors_of(held_out_letters(32, seed=7))
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    for epsilon, ascents in ((1e-6, 1), (0.5, 4), (1.0, 4)):
        change = attack(network, pixels, asked, broken, epsilon, ascents, noise)
        assert change.shape == pixels.shape and not change.requires_grad
        assert change.flatten(1).norm(dim=1).max() <= epsilon * 1.0001
        logits = network.judge(network.features(pixels + change), asked)[0]
        losses.append(float(functional.binary_cross_entropy_with_logits(logits, broken)))
    assert losses[0] + 0.5 < losses[1] < losses[2]
    aside = noise * (1.0 / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    logits = network.judge(network.features(pixels + aside), asked)[0]
    assert functional.binary_cross_entropy_with_logits(logits, broken) < losses[1], "noise of the same norm does less"


def test_an_attack_leaves_the_network_as_it_was() -> None:
    network = GlyphNetwork().train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    pixels, asked, broken = tensors_of(held_out_letters(4, seed=7))
    attack(network, pixels, asked, broken, 1.0, 2, torch.ones_like(pixels))
    assert network.training and all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_robust_network_is_trained_on_perturbed_letters() -> None:
    """From the standard one: with a perturbation of almost nothing the weights end elsewhere."""
    letters = drawing.draw_letters(8, FONTS, 0, SHARES)
    some, none = (train(letters, RobustTraining(epochs=1, batch=8, epsilon=epsilon), 0) for epsilon in (1.0, 1e-6))
    start, *ends = (network.state_dict()["broken.weight"] for network in (packaged(), some, none))
    assert not torch.equal(ends[0], ends[1])
    assert all(0 < (end - start).abs().max() < 0.01 for end in ends)


@pytest.mark.full
def test_the_robust_network_withstands_perturbations_that_turn_the_standard_one_around() -> None:
    letters = held_out_letters(64, seed=7)
    standard, robust = (
        aucs(letters, attacked_probabilities(packaged(variant=variant), letters, 1.0))["all"] for variant in FOLDERS
    )
    assert standard < 0.2 < 0.4 < robust
