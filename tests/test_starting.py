"""`retouch init`: a run file from whatever a folder holds, which `retouch check` takes and which trains."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from retouch.config import RunConfig, load_run
from retouch.data.discover import discover
from retouch.families import FAMILIES
from retouch.tiny.edits import write_edits
from retouch.tiny.signs import draw_words, synthesize, write_signs
from tests.command_line import retouch
from tests.docs.pages import REPOSITORY
from tests.selection import default, rows

ALGORITHMS = ("sft", "grpo", "ppo", "dpo", "nft")
DESCRIBED = ("sd_inpaint", "flux_fill", "qwen_image_edit", "flux_fill", "sd_inpaint")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten signs as photo.png and masks/photo.png with captions in captions/photo.txt; one image lacks both."""
    root = tmp_path_factory.mktemp("init")
    write_signs(root / "signs", draw_words(11, "train", 1), (32, 64), 1)
    folder = root / "my photos"
    for name in ("images", "masks", "captions"):
        (folder / name).mkdir(parents=True)
    for i in range(11):
        shutil.copy(root / f"signs/test{i}_source.png", folder / f"images/p{i:02}.png")
        if i < 10:
            shutil.copy(root / f"signs/test{i}_mask.png", folder / f"masks/p{i:02}.png")
            (folder / f"captions/p{i:02}.txt").write_text(f"a sign\non a wall {i}\n", encoding="utf-8")
    return folder


def started(tmp_path: Path, folder: Path, *options: str) -> tuple[RunConfig, str]:
    outcome = retouch("init", folder, "--out", tmp_path / "run.yaml", *options)
    assert outcome.code == 0, outcome.err
    check = retouch("check", tmp_path / "run.yaml")
    assert check.code == 0, check.err
    return load_run(tmp_path / "run.yaml"), outcome.out


@pytest.mark.parametrize(
    ("family", "algorithm"), rows([*product(dict.fromkeys(DESCRIBED), ALGORITHMS)], [*zip(DESCRIBED, ALGORITHMS)])
)
def test_descriptions_get_rewards_that_fit_them(photos: Path, tmp_path: Path, family: str, algorithm: str) -> None:
    run, out = started(tmp_path, photos, "--family", family, "--algorithm", algorithm)
    assert (run.model.family, run.algorithm.name) == (family, algorithm)
    published = yaml.safe_load((REPOSITORY / "configs/flux_fill_manifest_grpo.yaml").read_text(encoding="utf-8"))
    written = yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))
    assert written["rewards"] == {name: published["rewards"][name] for name in ("clip", "seam")}
    assert written["model"]["train"] == {"kind": "lora", "rank": 32}  # alpha follows the rank
    assert "10 examples (images and captions by name), 10 with a mask, 0 with a text to write" in out
    assert "left out: images/p10.png: no caption, no mask" in out
    held_out = run.evaluation.data
    assert held_out is not None
    prompts = [item.prompt for path in (run.data.path, held_out.path) for item in discover(Path(path)).items]
    assert sorted(prompts) == [f"a sign on a wall {i}" for i in range(10)]
    assert len((tmp_path / "run.yaml").read_text(encoding="utf-8").split("#")) > 15


def test_lists_of_an_earlier_start_are_not_passed_over(photos: Path, tmp_path: Path) -> None:
    """The new run had no held-out examples, because the list that would name them was there."""
    started(tmp_path, photos, "--family", "flux_fill")
    for name in ("run.yaml", "run_data.json", "run_data_train.json"):
        (tmp_path / name).unlink()
    outcome = retouch("init", photos, "--out", tmp_path / "run.yaml")
    assert outcome.code == 2 and f"--out: {tmp_path / 'run_data_held_out.json'} exists; set --out" in outcome.err


@pytest.mark.parametrize("algorithm", default(["sft", "grpo", "dpo"], "grpo".__eq__))
def test_it_trains(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert retouch("init", photos, "--model", "tiny", "--algorithm", algorithm).code == 0
    outcome = retouch("train", "run.yaml", "training.max_steps=1", "evaluation.num_examples=1")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / f"runs/run_{algorithm}/report.html").is_file()


def test_lists_are_read_as_they_stand(signs: Path, tmp_path: Path) -> None:
    """And a text to write gets OCR; nothing but the run file is written."""
    run, _ = started(tmp_path, signs / "targets")
    assert (run.data.format, run.data.path, list(run.rewards)) == ("self_bench", str(signs / "targets"), ["ocr"])
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]


def test_several_texts_are_read_each_at_its_place(tmp_path: Path) -> None:
    """With a tiny base: at the size of the data, and without detection switched off, which needs one line."""
    options: dict[str, Any] = {"half": "train", "seed": 1, "size": (64, 64), "length": 4, "exclude": None}
    synthesize(tmp_path / "signs", 8, targets=True, caption_noise=0.0, texts=2, **options)
    run, _ = started(tmp_path, tmp_path / "signs", "--model", "tiny")
    assert (list(run.rewards), run.data.size) == (["ocr_lines"], (64, 64))


def test_edits_get_the_lengths_of_their_own_tiny_base(tmp_path: Path) -> None:
    write_edits(tmp_path / "edits", 8, "train", 1)
    run, out = started(tmp_path, tmp_path / "edits", "--family", "qwen_image_edit", "--model", "tiny")
    base: Any = yaml.safe_load((REPOSITORY / "configs/tiny/qwen_image_edit_vlm_grpo.yaml").read_text())
    assert run.data.size == (32, 32) and base["data"]["resolution"] == 32
    assert getattr(run.model, "max_sequence_length") == base["model"]["max_sequence_length"]  # noqa: B009
    assert "is cut" not in out


def test_large_images_are_resized_for_a_tiny_base(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "photos")
    for file in [*folder.glob("images/*"), *folder.glob("masks/*")]:
        Image.open(file).resize((512, 384)).save(file)
    assert started(tmp_path, folder, "--model", "tiny")[0].data.size == (32, 64)


def wide_signs(folder: Path) -> Path:
    """Six signs of 320 x 160 with wide masks and captions that quote their text; the last one is cut off."""
    folder.mkdir()
    for i in range(6):
        Image.new("RGB", (320, 160), (20 * i, 80, 90)).save(folder / f"s{i}.png")
        mask = Image.new("L", (320, 160), 0)
        mask.paste(255, (10, 60, 310, 100))
        mask.save(folder / f"s{i}_mask.png")
        (folder / f"s{i}.txt").write_text(f'a sign that says "WORD{i}"', encoding="utf-8")
    return folder


def test_wide_masks_get_a_size_that_does_not_cut_them(tmp_path: Path) -> None:
    run, _ = started(tmp_path, wide_signs(tmp_path / "signs"))
    assert (run.data.size, run.data.image_options.fit) == ((368, 720), "crop")
    assert retouch("data", "validate", tmp_path / "run.yaml").code == 0
    split = f"retouch data split {run.data.path} --share 0.2"
    assert f"`{split}` holds some out, of about ten or more (here 6)\n" in (tmp_path / "run.yaml").read_text()
    assert retouch(*split.split()[1:]).code == 0
    assert [item.metadata["text"] for item in discover(Path(run.data.path)).items] == [f"WORD{i}" for i in range(6)]


def test_a_split_that_was_tried_is_not_recommended(tmp_path: Path) -> None:
    """Items that share an image stay together: of eight captions of one image, none can be held out."""
    folder = wide_signs(tmp_path / "signs")
    for i in range(1, 8):
        for end in (".png", "_mask.png"):
            shutil.copy(folder / f"s0{end}", folder / f"s{i}{end}")
        (folder / f"s{i}.txt").write_text(f'a sign that says "WORD{i}"', encoding="utf-8")
    run, _ = started(tmp_path, folder)
    assert run.evaluation.data is None
    written = (tmp_path / "run.yaml").read_text()
    assert "data split" not in written and "no part of these could be held out" in written


def test_one_caption_without_a_text_does_not_change_the_reward(tmp_path: Path) -> None:
    """It is left out of the manifest; a list of the user's is kept as it is, and its examples are counted."""
    folder = wide_signs(tmp_path / "signs")
    for number, caption in enumerate(["a sign: “WORD”", "看板「営業中」", "a plain wall", "ein Schild: „Wort“"]):
        (folder / f"s{number}.txt").write_text(caption, encoding="utf-8")
    run, out = started(tmp_path, folder)
    assert [*run.rewards] == ["ocr"] and "5 examples" in out and "5 with a text to write" in out
    assert "left out: s2.png: no text in quotes in its caption, as most have" in out
    texts = [item.metadata["text"] for item in discover(Path(run.data.path)).items]
    assert texts == ["WORD", "営業中", "Wort", "WORD4", "WORD5"]
    entries = json.loads(Path(run.data.path).read_text(encoding="utf-8"))
    own = tmp_path / "own.json"
    absolute = {key: str(tmp_path / entries[0][key]) for key in ("image_path", "mask_path")}
    own.write_text(json.dumps([*({**absolute, "prompt": "“A”"} for _ in range(3)), {**absolute, "prompt": "b"}]))
    outcome = retouch("init", own, "--out", tmp_path / "own.yaml")
    assert "1 without a text, on whose samples the reward fails" in outcome.out and "rewards ocr" in outcome.out
    own.write_text(json.dumps([{**absolute, "prompt": "“A”"}, *({**absolute, "prompt": "b"} for _ in range(2))]))
    assert "rewards clip, seam" in retouch("init", own, "--out", tmp_path / "few.yaml").out


@pytest.mark.parametrize("family", default([*FAMILIES], {"sdxl_inpaint", "sd3", "flux2_klein"}.__contains__))
def test_every_family_gets_a_run_file(photos: Path, tmp_path: Path, family: str) -> None:
    """Of images and masks; of prompts, if it generates from them alone."""
    assert started(tmp_path, photos, "--family", family)[0].model.family == family
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f'a sign that says "WORD{i}"\n' for i in range(9)), encoding="utf-8")
    outcome = retouch("init", prompts, "--family", family, "--out", tmp_path / "of_prompts.yaml")
    if FAMILIES[family].spec.needs:
        assert outcome.code == 2 and f"given '{family}', which needs images, but {prompts} has prompts" in outcome.err
        assert "sd3" in outcome.err.partition("set --family to one of")[2]
        return
    assert outcome.code == 0, outcome.err
    run = load_run(tmp_path / "of_prompts.yaml")
    assert (run.data.format, run.data.path, [*run.rewards]) == ("prompts", str(prompts), ["ocr"])
    assert "fit:" not in (tmp_path / "of_prompts.yaml").read_text(encoding="utf-8")


def test_the_next_commands_are_as_a_shell_takes_them(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n", encoding="utf-8")
    outcome = retouch("init", prompts, "--family", "sd3", "--out", tmp_path / "my run.yaml", "--model", "tiny")
    assert outcome.code == 0, outcome.err
    assert load_run(tmp_path / "my run.yaml").name == "my-run_grpo"
    command = shlex.split(outcome.out.splitlines()[-1].removeprefix("next: ").partition(";")[0])
    assert command == ["retouch", "data", "validate", str(tmp_path / "my run.yaml")]


def test_prompts_without_a_text_get_clip(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n", encoding="utf-8")
    for model in ("tiny", "some/folder"):
        outcome = retouch("init", prompts, "--family", "sd3", "--out", tmp_path / f"{model[:4]}.yaml", "--model", model)
        assert outcome.code == 0, outcome.err
        assert [*load_run(tmp_path / f"{model[:4]}.yaml").rewards] == ["clip"]


def test_a_folder_without_a_list_is_referred_to_init(tmp_path: Path) -> None:
    outcome = retouch("data", "validate", wide_signs(tmp_path / "signs"))
    assert outcome.code == 2 and outcome.err.endswith("; `retouch init` writes a list of these images\n")


def test_masks_that_no_crop_keeps_are_stretched(tmp_path: Path) -> None:
    folder = wide_signs(tmp_path / "signs")
    for role in ("", "_mask"):
        file = folder / f"s5{role}.png"
        Image.open(file).rotate(90, expand=True).save(file)
    run, _ = started(tmp_path, folder)
    assert (run.data.size, run.data.image_options.fit) == ((512, 512), "stretch")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("kto", "--algorithm: given 'kto', which needs target_path of each example; write a manifest with them"),
        ("reward_gradient", "--algorithm: given 'reward_gradient', for which init writes no run file with the rewards"),
    ],
)
def test_an_algorithm_that_does_not_fit_writes_nothing(tmp_path: Path, algorithm: str, message: str) -> None:
    folder = wide_signs(tmp_path / "signs")
    outcome = retouch("init", folder, "--out", tmp_path / "run.yaml", "--algorithm", algorithm)
    assert outcome.code == 2 and message in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["signs"]


def test_a_broken_image_is_left_to_validate(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "photos")
    first = sorted(folder.glob("images/*"))[0]
    first.write_bytes(first.read_bytes()[:200])
    assert started(tmp_path, folder, "--model", "tiny")[0].data.size == (32, 64)
    outcome = retouch("data", "validate", tmp_path / "run.yaml")
    assert outcome.code == 2 and f"{first.name}: damaged image" in outcome.out


def test_a_manifest_in_a_folder(signs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    paths = {"image_path": str(signs / "targets/test0_source.png"), "mask_path": str(signs / "targets/test0_mask.png")}
    (data / "list.json").write_text(json.dumps([{"prompt": "a cat", **paths}]), encoding="utf-8")
    (data / "other.json").write_text("{}", encoding="utf-8")
    run, _ = started(tmp_path, data)
    assert (run.data.format, Path(run.data.path).name, list(run.rewards)) == ("manifest", "list.json", ["clip", "seam"])
    shutil.copy(data / "list.json", data / "second.json")
    assert "several manifests (list.json, second.json)" in retouch("init", data, "--out", tmp_path / "b.yaml").err


def test_names_that_belong_together(photos: Path, tmp_path: Path) -> None:
    """Endings of names as well as folders; targets, references, hidden files."""
    image, mask = photos / "images/p00.png", photos / "masks/p00.png"
    for name, file in {
        "Dog.png": image,
        "Dog_mask.PNG": mask,
        "Dog-target.png": image,
        "Dog.ref.png": image,
        "originals/cat.png": image,
        "masks/cat.png": mask,
        ".thumbnails/Dog.png": image,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / name)
    (tmp_path / "Dog.txt").write_text("a dog", encoding="utf-8")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/cat.txt").write_text("a cat", encoding="utf-8")
    found = discover(tmp_path)
    dog, cat = sorted(found.entries, key=lambda entry: entry["prompt"], reverse=True)
    assert {key: Path(value).name for key, value in dog.items()} == {
        "prompt": "a dog",
        "image_path": "Dog.png",
        "mask_path": "Dog_mask.PNG",
        "target_path": "Dog-target.png",
        "reference_path": "Dog.ref.png",
    }
    assert {key: Path(value).parent.name for key, value in cat.items()} == {
        "prompt": "",
        "image_path": "originals",
        "mask_path": "masks",
    }
    assert not found.left_out
    assert sorted((item.prompt, item.target) for item in found.items) == [("a cat", "none"), ("a dog", "file")]


@pytest.mark.parametrize("top", ["images", "masks", "prompts"])
def test_the_name_of_the_folder_itself_is_no_role(photos: Path, tmp_path: Path, top: str) -> None:
    folder = shutil.copytree(photos / "images", tmp_path / top)
    shutil.copytree(photos / "masks", folder / "masks", dirs_exist_ok=True)
    shutil.copytree(photos / "captions", folder / "captions")
    found, usual = discover(folder), discover(photos)
    assert sorted(entry["prompt"] for entry in found.entries) == sorted(entry["prompt"] for entry in usual.entries)
    assert all({"image_path", "mask_path", "prompt"} == entry.keys() for entry in found.entries)


def test_the_folder_of_a_role_may_hold_others(photos: Path, tmp_path: Path) -> None:
    """As kohya keeps images and masks: the masks were images without a caption, and the images had no mask."""
    for role, part in (("images", "img"), ("masks", "mask")):
        for folder in ("10_sks dog", "1_dog"):
            (tmp_path / part / folder).mkdir(parents=True)
            shutil.copy(photos / role / "p00.png", tmp_path / part / folder / "1.png")
            (tmp_path / "img" / folder / "1.txt").write_text(folder, encoding="utf-8")
    found = discover(tmp_path)
    assert not found.left_out and sorted(entry["prompt"] for entry in found.entries) == ["10_sks dog", "1_dog"]
    for entry in found.entries:
        assert entry["mask_path"] == entry["image_path"].replace("/img/", "/mask/")


@pytest.mark.parametrize(
    ("image", "mask", "caption"),
    [
        ("1_img.png", "1_img_mask.png", "1_img.txt"),
        ("img/1_img.png", "mask/1_img.png", "captions/1_img.txt"),
        ("1_img.png", "1_mask.png", "1.txt"),
        ("p_source_image.png", "p_source_mask.png", "p_source_caption.txt"),
        ("a_img_original.png", "a_img_mask.png", "a_img_prompt.txt"),
        ("masks/1_image.png", "masks/1_mask.png", "masks/1.txt"),
        ("images/1_image.png", "masks/1_image.png", "images/1_image.txt"),
        ("originals/1_image.png", "masks/1_image.png", "captions/1_image.txt"),
    ],
)
def test_the_ending_of_an_image_may_stand_on_its_mask(
    photos: Path, tmp_path: Path, image: str, mask: str, caption: str
) -> None:
    for file in (image, mask, caption):
        (tmp_path / file).parent.mkdir(exist_ok=True)
    shutil.copy(photos / "images/p00.png", tmp_path / image)
    shutil.copy(photos / "masks/p00.png", tmp_path / mask)
    (tmp_path / caption).write_text("a sign", encoding="utf-8")
    found = discover(tmp_path)
    assert not found.left_out
    assert [entry["mask_path"] for entry in found.entries] == [str((tmp_path / mask).resolve())]


def test_two_images_of_a_folder_of_masks_are_no_image_and_its_mask(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for name in ("1_image.png", "1_original.png"):
        shutil.copy(photos / "images/p00.png", tmp_path / "masks" / name)
    (tmp_path / "masks/1.txt").write_text("a sign", encoding="utf-8")
    found = discover(tmp_path)
    assert [entry.keys() for entry in found.entries] == [{"prompt", "image_path"}]
    assert found.left_out == ["masks/1_original.png: has the name and role of masks/1_image.png; rename one of them"]


def test_no_image_disappears_because_of_its_format(photos: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b.HEIC", "c.avif", "d.gif"):
        shutil.copy(photos / "images/p00.png", tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("a sign", encoding="utf-8")
    found = discover(tmp_path)
    assert len(found.entries) == 1
    assert found.left_out == [f"{name}: not read; convert it to PNG or JPEG" for name in ("b.HEIC", "c.avif", "d.gif")]


def test_names_that_are_not_utf8_are_listed(photos: Path, tmp_path: Path) -> None:
    """Of an archive that another system packed: the manifest and the run file could not be written."""
    other = os.fsdecode(b"caf\xe9")
    for folder in (tmp_path / "a", tmp_path / other):
        folder.mkdir()
        for name in ("sign", other):
            shutil.copy(photos / "images/p00.png", folder / f"{name}.png")
            (folder / f"{name}.txt").write_text("a sign", encoding="utf-8")
    options = ("--out", tmp_path / "run.yaml", "--family", "qwen_image_edit")
    outcome = retouch("init", tmp_path / "a", *options)
    assert outcome.code == 0 and "1 example " in outcome.out
    assert outcome.out.count(".png: a name that is not UTF-8; rename it") == 1
    assert "a name that is not UTF-8, which no run file can hold" in retouch("init", tmp_path / other, *options).err


def test_a_list_without_a_usable_item_says_why(photos: Path, tmp_path: Path) -> None:
    """And a file of another format is no folder: it ended in a message of the operating system."""
    shutil.copy(photos / "images/p00.png", tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "caption": "a sign"}', encoding="utf-8")
    (tmp_path / "images.tar").write_bytes(b"x" * 512)
    out = ("--out", tmp_path / "run.yaml")
    error = retouch("init", tmp_path, *out).err
    assert "a list for data.format=manifest; entry 0: prompt missing" in error and "'file_name', 'caption'" in error
    assert "images.tar; expected a mapping_file.json" in retouch("init", tmp_path / "images.tar", *out).err


def test_broken_entries_of_a_list_are_listed(photos: Path, tmp_path: Path) -> None:
    """They were counted nowhere: a list with one good entry of seven was "1 example"."""
    good = {"prompt": "a sign", "image": str(photos / "images/p00.png"), "mask": str(photos / "masks/p00.png")}
    entries = [good, {**good, "prompt": ""}, good]
    (tmp_path / "list.json").write_text(json.dumps(entries), encoding="utf-8")
    outcome = retouch("init", tmp_path / "list.json", "--out", tmp_path / "run.yaml", "--model", "tiny")
    assert "2 examples" in outcome.out and "left out: entry 1: prompt missing or empty" in outcome.out


def test_a_picture_whose_name_ends_like_a_role_is_listed(photos: Path, tmp_path: Path) -> None:
    image = photos / "images/p00.png"
    for name in ("cat", "man_in_mask", "old_style-reference"):
        shutil.copy(image, tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    found = discover(tmp_path)
    assert [entry["prompt"] for entry in found.entries] == ["a cat"]
    assert found.left_out == [
        "man_in_mask.png: a mask by its name, but it has no image",
        "old_style-reference.png: a reference by its name, but it has no image",
    ]


def test_an_empty_caption_is_none(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "captions/p03.txt").write_text(" \n", encoding="utf-8")
    _, out = started(tmp_path, folder)
    assert "left out: images/p03.png: no caption" in out and "9 examples" in out


def test_two_files_of_one_example_and_role(photos: Path, tmp_path: Path) -> None:
    """The first is used, and the second is listed: neither disappears silently."""
    image, folder = photos / "images/p00.png", tmp_path / "signs"
    folder.mkdir()
    for name in ("p0.jpg", "p0.png", "sign.png", "sign_original.png"):
        shutil.copy(image, folder / name)
    for name in ("p0", "sign"):
        shutil.copy(photos / "masks/p00.png", folder / f"{name}_mask.png")
        (folder / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    assert [Path(entry["image_path"]).name for entry in discover(folder).entries] == ["p0.jpg", "sign.png"]
    _, out = started(tmp_path, folder)
    assert "left out: p0.png: has the name and role of p0.jpg; rename one of them" in out
    assert "left out: sign_original.png: has the name and role of sign.png; rename one of them" in out


def test_what_cannot_be_started(photos: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        outcome = retouch("init", *arguments)
        assert outcome.code == 2
        return outcome.err

    assert refused(tmp_path / "no").startswith(f"error: FOLDER: given {tmp_path}/no; no such file or folder")
    assert "expected a mapping_file.json, a self_bench.txt, a cross_bench.txt" in refused(tmp_path)
    assert "--family: given 'flux_fil'; did you mean" in refused(photos, "--family", "flux_fil")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(photos / "images/p00.png", bare / "a.png")
    (bare / "a.txt").write_text("a sign", encoding="utf-8")
    out = ("--out", tmp_path / "run.yaml")
    assert "1 of 1 images of" in refused(bare, *out)
    assert retouch("init", bare, *out, "--family", "qwen_image_edit").code == 0
    assert f"--out: {tmp_path}/run.yaml exists" in refused(bare, *out, "--family", "qwen_image_edit")
    assert yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))["rewards"] == {
        "clip": {"url": "auto", "device": "auto"}
    }


def test_the_run_file_works_from_any_folder(
    photos: Path, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of lists beside it, and those that were given relative to the working directory."""
    shutil.copytree(signs / "targets", tmp_path / "signs")
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "signs"):
        assert retouch("init", folder, "--out", f"made/{folder}/run.yaml", "--model", "tiny").code == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    for folder in ("photos", "signs"):
        assert retouch("data", "validate", f"../made/{folder}/run.yaml").code == 0
    shutil.move(tmp_path / "made/photos", tmp_path / "made/moved")
    assert retouch("data", "validate", tmp_path / "made/moved/run.yaml").code == 0
