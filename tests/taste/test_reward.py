"""From votes on files to a reward: the fit sees the taste, the scorer scores it, and trainers read the votes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from retouch.algorithms.kto.config import label_of
from retouch.config import RunConfig
from retouch.config.check import require_trainable
from retouch.data.base import ItemFiles
from retouch.data.formats.votes import VotesData
from retouch.data.item import examine, read_item
from retouch.data.split import split
from retouch.errors import ConfigError, DataError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.taste import TasteReward, TasteScorer
from retouch.taste.choosing import Chooser
from retouch.taste.extractor import Extractor
from retouch.taste.head import read_taste
from retouch.taste.reward import features_of, fit_reward, half_of
from retouch.taste.votes import Vote, VotedImage, VoteFile, image_digest, read_votes
from retouch.training.build import build
from retouch.types import Score
from retouch.use.items import SampleRequest, items_to_sample
from tests.command_line import retouch
from tests.taste.voters import drawn_image, vote


def warmth(image: VotedImage) -> float:
    pixels = np.asarray(Image.open(image.image).convert("RGB"), np.float64)
    return float((pixels[..., 0] - pixels[..., 2]).mean())


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A voter who likes warm images, with 10 % noise."""
    folder, draw = tmp_path_factory.mktemp("voted"), np.random.default_rng(0)
    images = [drawn_image(folder, e, k, float(draw.uniform(-60, 60))) for e in range(30) for k in range(3)]
    path = folder / "votes.jsonl"
    vote(Chooser(images, 0, alone=False, informative=None), VoteFile(path), warmth, 90)
    return path


@pytest.fixture(scope="module")
def taste(votes: Path) -> Path:
    out = votes.parent / "taste.safetensors"
    fit_reward(votes, out, "tiny")
    return out


def scorer(path: Path, **options: object) -> TasteScorer:
    made = TasteReward.model_validate({"path": str(path), **options}).make()
    made.load("cpu")
    return made


def item(value: float, mask: bool = True) -> RewardItem:
    pixels = np.clip(128 + np.array([value, 0, -value]) + np.zeros((24, 40, 3)), 0, 255).astype(np.uint8)
    pixels[8:16, 10:30] += 1
    white = np.zeros((24, 40), np.uint8)
    white[8:16, 10:30] = 255
    return RewardItem("one", "a sign", pixels, mask=white if mask else None)


def test_the_taste_of_the_voter_is_what_the_reward_scores(taste: Path) -> None:
    values = [one.value for one in scorer(taste).score([item(w) for w in (-50, 0, 50)]) if isinstance(one, Score)]
    assert values == sorted(values) and len(values) == 3 and values[0] < 0.3 < 0.7 < values[2]


def test_a_cautious_reward_is_low_where_nobody_voted(taste: Path, votes: Path) -> None:
    """Voted images have one colour and a faint mark in the mask; half of the other ones' mask is black."""
    voted = [vote.left for vote in read_votes(votes)[:20]]
    masks = [np.asarray(Image.open(image.mask or "")) for image in voted]
    known = [RewardItem("", "", np.array(Image.open(i.image)), mask=m) for i, m in zip(voted, masks, strict=True)]
    strange = [replace(one, image=one.image.copy()) for one in known]
    for one in strange:
        one.image[8:16, 10:20] = 0

    def values(cautious: bool, items: list[RewardItem]) -> list[float]:
        found = scorer(taste, cautious=cautious).score(items)
        return [one.value for one in found if isinstance(one, Score)]

    plain, cautious = values(False, known), values(True, known)
    assert sum(a == b for a, b in zip(plain, cautious, strict=True)) >= 16  # of 19 expected
    assert max(values(True, strange)) < 1e-3 < max(values(False, strange))


def test_values_have_the_gradient_of_the_scores(taste: Path) -> None:
    made, one = scorer(taste), item(10.0)
    pixels = (torch.tensor(one.image).permute(2, 0, 1)[None] / 255).requires_grad_()
    [value] = made.values(pixels, [one])
    assert isinstance(value, torch.Tensor)
    [scored] = made.score([one])
    assert isinstance(scored, Score) and float(value.detach()) == pytest.approx(scored.value, abs=1e-6)
    value.backward()
    assert pixels.grad is not None
    red, _, blue = pixels.grad[0].sum(dim=(1, 2))
    assert red > blue  # warmer is better


def test_a_fit_sees_the_pixels_that_training_sees(
    votes: Path, tmp_path: Path, config: Callable[..., RunConfig]
) -> None:
    """Votes on images of 40 x 24: a run shows its window of them to the reward, at its own size."""
    out = tmp_path / "taste.safetensors"

    def run(resolution: list[int], fit: str = "crop", **more: object) -> RunConfig:
        own = {"evaluation__data": None, **more}
        return config(rewards={"taste": {"path": str(out)}}, data__resolution=resolution, data__fit=fit, **own)

    fitted, _ = fit_reward(votes, out, "tiny", run=run(resolution=[32, 32]))
    assert fitted.sizes == [(32, 32)] and read_taste(out).fit == "crop"
    one, section = read_votes(votes)[0].left, VotesData(path=str(votes), resolution=(32, 32))
    shown = next(read_item(i, section)[0] for i in items_of(votes, votes_as="labels") if i.target_path == one.image)
    assert shown.target is not None and shown.mask is not None
    features, sizes = features_of([one], Extractor("tiny"), section)
    pixels = torch.tensor(np.asarray(shown.target)).permute(2, 0, 1) / 255
    assert sizes == {(32, 32)}
    assert features.values[0].tolist() == Extractor("tiny")(pixels, np.asarray(shown.mask)).tolist()
    require_trainable(run(resolution=[32, 32]))
    with pytest.raises(ConfigError, match=r"fitted to images of 32 x 32 .*the run scores images of data of 32 x 64"):
        require_trainable(run(resolution=[32, 64]))
    with pytest.raises(ConfigError, match=r"data.fit=crop"):
        require_trainable(run(resolution=[32, 32], fit="stretch"))
    gold = {"ocr": {}, "gold": {"scorer": "taste", "path": str(out), "role": "gold"}}
    held_out = {"format": "self_bench", "path": "held_out", "resolution": [32, 32]}
    require_trainable(config(rewards=gold, data__resolution=[32, 64], evaluation__data=held_out))
    with pytest.raises(ConfigError, match=r"the run scores images of evaluation.data of 32 x 64"):
        require_trainable(run(resolution=[32, 32], evaluation__data={**held_out, "resolution": [32, 64]}))
    with pytest.raises(ConfigError, match=r"rewards.taste.crop: given 'mask_box'"):
        require_trainable(config(rewards={"taste": {"url": "http://127.0.0.1:9", "crop": "mask_box"}}))
    fit_reward(votes, out, "tiny")  # as they are
    with pytest.raises(ConfigError, match=r"images of 24 x 40 .*--config RUN.yaml"):
        require_trainable(run(resolution=[32, 32]))


def test_votes_that_come_later_change_no_half_and_no_id(votes: Path, tmp_path: Path) -> None:
    """Another example, in front of the others by name and in the file."""
    before, lines = read_votes(votes), votes.read_text().splitlines()
    more = tmp_path / "votes.jsonl"
    new = json.loads(lines[0]) | {"voter": "bob"}
    new["left"] |= {"example": "!"}
    new["right"] |= {"example": "!"}
    folder = votes.parent.resolve()
    kept = [json.loads(line) for line in lines]
    for entry in (new, *kept):
        for side in ("left", "right"):
            entry[side] |= {name: str(folder / Path(entry[side][name]).name) for name in ("image", "mask")}
    more.write_text("".join(json.dumps(entry) + "\n" for entry in (new, *kept)))
    assert [one.id for one in items_of(more)][1:] == [one.id for one in items_of(votes)]
    halves = {vote.left.example: half_of(vote.left.example) for vote in before}
    assert {*halves.values()} == {"first", "second"}
    sizes = {half: sum(half_of(v.left.example) == half for v in before) for half in ("first", "second")}
    for half, size in sizes.items():
        told, _ = fit_reward(votes, tmp_path / "half.safetensors", "tiny", half=half)  # type: ignore[arg-type]
        assert told.about["votes"] == size


def test_votes_are_divided_by_example(votes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "votes"
    shutil.copytree(votes.parent, folder)
    file = VoteFile(folder / "votes.jsonl")
    left, right = (i for i in file.all()[0].images)
    file.add(Vote(0, "ann", "tie", left, right))
    file.add(Vote(0, "bob", "left", left, right))
    file.undo("bob")
    train, held_out = (read_votes(part) for part in split(file.path, 0.3))
    assert sorted(v.number for v in (*train, *held_out)) == [v.number for v in file.all()]
    assert not {v.left.example for v in train} & {v.left.example for v in held_out} and len(held_out) > 9


def test_votes_that_come_later_move_no_photograph_to_the_other_side(tmp_path: Path) -> None:
    """On further masks of it, and where the first vote was taken back."""
    held_out: list[set[int]] = []
    for name, masks in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        file = VoteFile(tmp_path / name / "votes.jsonl")
        for number in range(20 * masks):
            source, image = file.path.with_name(f"{number % 20}-source.png"), file.path.with_name(f"{number}.png")
            source.write_text(f"photograph {number % 20}")
            image.write_text(f"sample {number}")
            file.add(Vote(0, "ann", "good", VotedImage(image, "", str(number), "a sign", source=source)))
        held_out.append({vote.number for vote in read_votes([*split(file.path, 0.5)][1])})
    assert held_out[0] == {number for number in held_out[1] if number <= 20}
    assert held_out[1] == held_out[0] | {number + 20 for number in held_out[0]}


def test_votes_on_two_copies_of_one_source_are_on_one_side(tmp_path: Path) -> None:
    """A copy at another size has other bytes; training found the original of both, and advised to divide the data."""
    file = VoteFile(tmp_path / "votes.jsonl")
    for number in range(24):
        copy = tmp_path / f"{number}.png"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(copy)
        image = VotedImage(copy, image_digest(copy), f"e{number}", source=copy, original=f"photo {number // 2}")
        file.add(Vote(0, "ann", "good", image))
    train, held_out = ({vote.left.original for vote in read_votes(part)} for part in split(file.path, 0.5))
    assert train and held_out and not train & held_out


def test_a_batch_and_an_odd_mask_change_no_score(taste: Path) -> None:
    made, items = scorer(taste), [item(-20.0), item(30.0), item(30.0, mask=False)]
    assert made.score(items) == [made.score([one])[0] for one in items]
    assert made.score([items[1]]) != made.score([items[2]])  # the view of the mask's box


def test_a_fit_to_images_without_masks_scores_whole_images(taste: Path, votes: Path) -> None:
    """Its features of the mask are those of the whole: of the mask of a run they would be others."""
    bare, out = votes.with_name("bare.jsonl"), votes.with_name("bare.safetensors")
    lines = [json.loads(line) for line in votes.read_text(encoding="utf-8").splitlines()[:40]]
    for line in lines:
        del line["left"]["mask"], line["right"]["mask"]
    bare.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    fit_reward(bare, out, "tiny")
    with_mask, without = (scorer(out).score([item(30.0, mask)])[0] for mask in (True, False))
    assert with_mask == without and read_taste(taste).masked and not read_taste(out).masked


def test_a_head_is_bound_to_the_weights_that_it_was_fitted_on(taste: Path, votes: Path) -> None:
    first = scorer(taste)
    assert read_taste(taste).digest in first.spec.revision
    changed = taste.parent / "changed.safetensors"
    other = taste.read_bytes().replace(Extractor("tiny").revision.split()[1].encode(), b"0" * 12)
    changed.write_bytes(other)
    with pytest.raises(ConfigError, match="fitted on the features"):
        scorer(changed)
    with pytest.raises(ConfigError, match="reward fit"):
        scorer(votes)
    save_file({"weights": np.zeros(5, np.float32)}, changed, {"format": "retouch.taste 1"})
    with pytest.raises(ConfigError, match=r"'retouch.taste 1'.*fit again"):
        scorer(changed)


def test_votes_of_chance_write_nothing(votes: Path, tmp_path: Path) -> None:
    """Answers drawn with a seed: at 95 % the fit is above chance in one of about twenty such draws."""
    draw, path = np.random.default_rng(1), tmp_path / "chance.jsonl"
    file = VoteFile(path)
    for one in read_votes(votes):
        file.add(Vote(0, "bob", str(draw.choice(["left", "right"])), one.left, one.right))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no score is above chance"):
        fit_reward(path, tmp_path / "taste.safetensors", "tiny")
    assert not (tmp_path / "taste.safetensors").exists()


def test_the_command_says_what_the_fit_is_worth(votes: Path, tmp_path: Path) -> None:
    out = tmp_path / "gold.safetensors"
    done = retouch("reward", "fit", str(votes), "--out", str(out), "--extractor", "tiny", "--half", "second", "--json")
    told = json.loads(done.out)
    assert done.code == 0 and told["half"] == "second" and told["accuracy"]["low"] > 0.5
    assert 30 <= told["votes"] <= 60 and read_taste(out).noise == told["min_group_std"]
    assert told["entry"] == f"rewards.gold={{scorer: taste, path: {out}, role: gold, cautious: true}}"


def items_of(votes: Path, **options: object) -> list[ItemFiles]:
    found = VotesData.model_validate({"path": str(votes), **options}).list_items()
    assert all(isinstance(one, ItemFiles) for one in found), found
    return [one for one in found if isinstance(one, ItemFiles)]


def test_votes_are_pairs_for_dpo_and_labels_for_kto(votes: Path, tmp_path: Path) -> None:
    pairs = items_of(votes)
    assert len(pairs) == 90 and len({one.id for one in pairs}) == 90
    first, of_file = pairs[0], read_votes(votes)[0]
    assert of_file.right is not None
    sides = {of_file.left.image, of_file.right.image}
    assert {first.win_path, first.lose_path} == sides and first.mask_path == of_file.left.mask
    assert first.win_path == (of_file.left if of_file.answer == "left" else of_file.right).image
    labelled = items_of(votes, votes_as="labels")
    assert [label_of(one) for one in labelled] == [True, False] * 90
    assert labelled[0].target_path == first.win_path and labelled[0].target == "file"
    assert VotesData.recognises(votes) and not VotesData.recognises(tmp_path)


def test_an_input_counts_once_in_evaluations_whatever_the_number_of_votes_on_its_samples(
    votes: Path, tmp_path: Path, config: Callable[..., RunConfig]
) -> None:
    """By an id that later votes do not change, in a run and for `retouch sample`."""
    pairs, labels = VotesData(path=str(votes)), VotesData(path=str(votes), votes_as="labels")
    once = labels.each_once(items_of(votes, votes_as="labels"))
    assert len(once) == len({one.prompt for one in once}) == 30
    assert {one.id for one in pairs.each_once(items_of(votes)[::-1])} == {one.id for one in once}
    listed = [replace(image, source=image.image) for vote in read_votes(votes) for image in vote.images[:1]]
    file = VoteFile(tmp_path / "votes.jsonl")
    for image in listed[:20]:
        file.add(Vote(0, "ann", "good", replace(image, source=listed[0].image, mask=listed[0].mask, prompt="a sign")))
    data = {"format": "votes", "votes_as": "labels", "path": str(file.path)}
    run = config(data=data, evaluation__data=None, data__resolution=[32, 64])
    [example] = build(run).eval_data.items
    assert [item.id for item in items_to_sample(run, SampleRequest(data=file.path))[1]] == [example.id]


def test_an_image_that_was_replaced_after_the_votes_is_neither_fitted_nor_trained_on(tmp_path: Path) -> None:
    images = [drawn_image(tmp_path, e, k, 9.0 * k) for e in range(12) for k in range(2)]
    file = VoteFile(tmp_path / "votes.jsonl")
    for one, other in zip(images[::2], images[1::2], strict=True):
        file.add(Vote(0, "ann", "left", one, other))
    Image.new("RGB", (40, 24), "blue").save(images[0].image)
    with pytest.raises(DataError, match=r"0-0\.png: another image than the one that was voted on"):
        fit_reward(file.path, tmp_path / "taste.safetensors", "tiny")
    for votes_as in ("pairs", "labels"):
        found = VotesData.model_validate({"path": str(file.path), "votes_as": votes_as}).list_items()
        wrong = [i for i, one in enumerate(found) if not isinstance(one, ItemFiles)]
        assert wrong == list(range(len(found) // 12)) and "voted on" in str(found[0])


def test_a_problem_names_the_vote(votes: Path, tmp_path: Path) -> None:
    """Nobody can find a vote by the id of its example."""
    file = VoteFile(tmp_path / "votes.jsonl")
    for one in read_votes(votes)[:2]:
        file.add(Vote(0, "ann", "left", *(replace(image, prompt=" ") for image in one.images)))
    section = VotesData(path=str(file.path), resolution=(24, 40))
    found = [examine(item, section) for item in section.items() if isinstance(item, ItemFiles)]
    assert [str(one).split(":")[0] for one in found] == ["vote 1 of ann", "vote 2 of ann"]


def test_masks_of_votes_are_white_where_to_repaint_whatever_the_run_inverts(votes: Path) -> None:
    section = VotesData.model_validate({"path": str(votes), "invert_mask": True})
    [one, *_] = items_of(votes)
    mask = read_item(one, section.model_copy(update={"resolution": (24, 40)}))[0].mask
    assert mask is not None and mask.getpixel((0, 0)) == 0 and mask.getpixel((20, 12)) == 255


def test_a_reward_is_the_same_where_its_file_is_moved(taste: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(taste.read_bytes())
    assert scorer(moved).spec.revision == scorer(taste).spec.revision


def test_an_edit_may_be_preferred_to_its_source(votes: Path, tmp_path: Path) -> None:
    [one, *_] = read_votes(votes)
    left, right = (VotedImage(i.image, i.sha256, i.example, "edit", source=i.image) for i in one.images)
    file = VoteFile(tmp_path / "votes.jsonl")
    for answer in ("left", "tie", "both_bad"):
        file.add(Vote(0, "ann", answer, left, right))  # type: ignore[arg-type]
    pairs = items_of(file.path, source_is_rejected=True)
    assert [(p.win_path, p.lose_path) for p in pairs] == [(left.image, right.image), (left.image, left.source)]
    assert [label_of(one) for one in items_of(file.path, votes_as="labels")] == [True, False, False, False]
