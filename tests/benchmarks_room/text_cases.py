"""Small cases of the benchmarks of text, in their published layouts, made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.benchmarks_room.cases import Case
from tests.tiny_models import tiny_clip

OCR = {"threads": 1}


def picture(path: Path, size: tuple[int, int] = (512, 512)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.linear_gradient("L").resize(size).convert("RGB").save(path)


def polygon(left: int, top: int, right: int, bottom: int) -> list[list[int]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def annotated(text: str, box: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    return {"polygon": polygon(*box), "text": text, "language": "Latin", "pos": 0, "valid": True, **more}


def write_anytext(folder: Path) -> Path:
    """Three images: two lines; a line too long and one that is not valid; none."""
    annotations = [
        [annotated("OPEN", (60, 60, 300, 120)), annotated("DAILY 9-5", (100, 300, 400, 380))],
        [annotated("A" * 25, (50, 200, 450, 280)), annotated("no", (0, 0, 50, 50), valid=False)],
        [annotated("none", (0, 0, 9, 9), polygon=[])],
    ]
    items = [
        {"img_name": f"{n:03d}.v1.jpg", "caption": f"a *sign {n}", "annotations": own}
        for n, own in enumerate(annotations)
    ]
    for item in items:
        picture(folder / "imgs" / str(item["img_name"]))
    (folder / "test1k.json").write_text(json.dumps({"data_root": "/data", "data_list": items}), encoding="utf-8")
    return folder


def write_textflux(folder: Path) -> Path:
    """Two images of ReCTS with another word each."""
    lines = [annotated("咖啡", (100, 40, 300, 120)), annotated("x", (0, 0, 9, 9))]
    items = [{"img_name": f"image_{n}.jpg", "caption": "", "annotations": lines} for n in range(2)]
    for item in items:
        picture(
            folder / "textflux_data/processed_ReCTS_test_images_other_words/original" / str(item["img_name"]),
            (400, 256),
        )
    (folder / "ReCTS_other.json").write_text(json.dumps({"data_list": items}, ensure_ascii=False), encoding="utf-8")
    return folder


def write_longtext(folder: Path) -> Path:
    """Two English prompts and a Chinese one; ids have gaps."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"category": "sign", "length": "short", "text": ["OPEN DAILY", "Come in!"], "text_length": 4}
    english = [{**about, "prompt": f"a sign {n}", "prompt_id": n} for n in (79, 100)]
    chinese = [{**english[0], "text": ["你好 WORLD"], "prompt_id": 0}]
    for name, entries in (("text_prompts.jsonl", english), ("text_prompts_zh.jsonl", chinese)):
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_cvtg(folder: Path) -> Path:
    """One prompt in each of the eight files."""
    for style in ("CVTG", "CVTG-Style"):
        (folder / style).mkdir(parents=True)
        for count in (2, 3, 4, 5):
            texts = ["Grand Opening", "Sale", "50% off", "Tea", "Bar"][:count]
            item = {"index": 7, "prompt": f"signs of {texts}", "carrier_list": ["sign"] * count, "sentence_list": texts}
            (folder / style / f"{count}.json").write_text(json.dumps({"data_list": [item]}), encoding="utf-8")
    return folder


def write_textedit(folder: Path) -> Path:
    """A virtual and a real item of the small set."""
    for category in ("1.2.2", "2.6"):
        names = {key: f"{category}/image/{key.split('_')[0]}/77.0.jpg" for key in ("original_image", "gt_image")}
        for name in names.values():
            picture(folder / "data" / name, (160, 120))
        item = {
            "id": 7, "prompt": "Replace the text 'SALE' with 'Menu'.", **names, "source_text": "SALE",
            "target_text": "Menu", "gt_caption": "a sign",
        }  # fmt: skip
        path = folder / "eval_prompts" / "miniset" / f"{category}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(item) + "\n", encoding="utf-8")
    return folder


def _anytext(folder: Path) -> dict[str, Any]:
    write_anytext(folder)
    return {"resolution": 64, "images_per_item": 2, "rewards": {"anytext": OCR}}


def _textflux(folder: Path) -> dict[str, Any]:
    write_textflux(folder)
    return {"resolution": 64, "rewards": {"anytext": OCR}}


def _longtext(folder: Path) -> dict[str, Any]:
    write_longtext(folder)
    return {"resolution": 64, "images_per_item": 2}


def _cvtg(folder: Path) -> dict[str, Any]:
    write_cvtg(folder)
    return {"resolution": 64, "rewards": {"cvtg": OCR}}


def _textedit(folder: Path) -> dict[str, Any]:
    write_textedit(folder)
    rewards = {"textedit": OCR, "textedit_judge": {}, "clip": {"path": tiny_clip()}}
    return {"resolution": 64, "part": "miniset", "rewards": rewards}


def _ocr_prompts(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.txt").write_text('A sign that reads "Open 24"\nA cake with "Ida"\n', encoding="utf-8")
    return {"path": str(folder / "test.txt"), "resolution": 64, "rewards": {"flow_grpo_ocr": OCR, "ocr": OCR}}


TEXT_CASES: dict[str, Case] = {
    "anytext": Case(_anytext, frozenset({"sen_acc_en", "ned_en"}), "text"),
    "anytext_edit": Case(_anytext, frozenset({"sen_acc_en", "ned_en"})),
    "cvtg": Case(_cvtg, frozenset({"word_accuracy", "ned", "word_accuracy_5"}), "text"),
    "longtext": Case(_longtext, frozenset({"text_en"}), "text"),
    "ocr_prompts": Case(_ocr_prompts, frozenset({"ocr_accuracy", "ned", "exact"}), "text"),
    "textedit": Case(_textedit, frozenset({"f1_real", "accuracy_virtual", "judge_real", "clip_virtual"}), "edit"),
    "textflux": Case(_textflux, frozenset({"seq_acc", "ned"})),
}
