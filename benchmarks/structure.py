"""Does OCR see broken letters, and which text rewards does a noise pattern fool?

letters: single letters and words in fonts that glyph_structure never saw, half of them with one defect. Area under the
ROC curve of broken against whole: both networks of glyph_structure beside the recogniser's confidence and its reading,
on the same images.

attacks: an image of noise is optimised for 200 steps to raise one reward: with the gradient of each network of
glyph_structure, and without gradients (natural evolution strategies) for every reward and for the product of reading
and structure. The final images are scored by all rewards and compared with renderings of the text (glyph correlation),
which a pattern without letters does not raise.

    python benchmarks/structure.py --out benchmarks/results/structure.json --picture docs/images/structure-attacks.png
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from inputs import digest
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from words import Word, draw_word

from retouch.data.sampler import derive_seed
from retouch.imaging.glyphs import glyph_correlation
from retouch.observe.environment import environment
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer
from retouch.rewards.text_distance import text_similarity
from retouch.types import Score
from retouch_glyphs.glyph_structure import FOLDERS, LETTERS, WEIGHTS, Variant, packaged, structure_of
from retouch_glyphs.scorers.glyph_structure import GlyphStructureReward, equal_slices
from retouch_glyphs.tiny.broken_letters import STRUCTURAL, TEST_FONTS, Letter, names_of
from retouch_glyphs.tiny.glyph_structure import auc, aucs, broken_probabilities, held_out_letters

Values = NDArray[np.float64]
Report = dict[str, Any]

PARTS = ("letters", "words", "attacks")

NETWORKS: dict[str, Variant] = {"glyph_structure": "standard", "glyph_structure, robust": "robust"}
"""Names in the tables."""

TEXT = "SALE"
SIZE = (48, 128)  # height, width of an attacked image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--letters", type=int, default=1000)
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200, help="of an attack")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the attacked noise")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add parts to")
    parser.add_argument("--picture", type=Path, help="PNG of the attacked images of the first seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reader = OcrReward(detect=False, threads=1).make()
    reader.load("cpu")
    weights = {variant: digest((folder / WEIGHTS).read_bytes()) for variant, folder in FOLDERS.items()}
    found: Report = {}
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))
    if found.get("inputs") != weights:  # parts of another network are not kept
        found = {"machine": environment()["packages"], "inputs": weights}
    for part in arguments.parts:
        if part == "letters":
            found[part] = of_letters(reader, held_out_letters(arguments.letters, seed=1))
        elif part == "words":
            found[part] = of_words(reader, arguments.words)
        else:
            rows, images = attacks(reader, arguments.steps, arguments.seeds)
            found[part] = {"text": TEXT, "size": SIZE, "steps": arguments.steps, "seeds": arguments.seeds, "rows": rows}
            if arguments.picture:
                picture(images, arguments.picture)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(tables(found)))


def tables(found: Report) -> list[str]:
    """The tables of docs/measured.md, of the parts that were measured."""
    made: list[str] = []
    if "letters" in found:
        letters = found["letters"]
        lines = ["| broken from whole by | AUC | erased | added | warped | spliced | read as asked | found |"]
        lines.append("|---" * 8 + "|")
        for name, areas in letters["auc"].items():
            shown = [areas["all"], *(areas[d] for d in STRUCTURAL), letters["auc_read_as_asked"][name]]
            cells = [f"{value:.3f}" for value in shown] + [f"{letters['found_at_5_percent'][name]:.0%}"]
            lines.append(f"| {' | '.join([name, *cells])} |")
        made.append("\n".join(lines))
    if "words" in found:
        cells = [f"| {name} | {area:.3f} |" for name, area in found["words"]["auc"].items()]
        made.append("\n".join(["| a word with a broken letter by | AUC |", "|---|---|", *cells]))
    if "attacks" in found:
        rows = found["attacks"]["rows"]
        measures = [key for key in rows[0] if key != "attack"]
        lines = [f"| attacked | {' | '.join(measures)} |", "|---" * (len(measures) + 1) + "|"]
        lines += [f"| {row['attack']} | {' | '.join(f'{row[m]:.2f}' for m in measures)} |" for row in rows]
        made.append("\n".join(lines))
    return made


# --- broken or whole ---


def of_letters(reader: OcrScorer, letters: Sequence[Letter]) -> Report:
    """Areas by defect; what is found at 5 % false alarms; and both among letters that are read as asked."""
    read = reader.read([letter.pixels for letter in letters])
    right = np.array([text == LETTERS[letter.asked] for (text, _), letter in zip(read, letters, strict=True)])
    confidence = np.array([value for _, value in read])
    similar = [text_similarity(text, LETTERS[letter.asked]) for (text, _), letter in zip(read, letters, strict=True)]
    scores = {name: broken_probabilities(packaged(variant=of), letters) for name, of in NETWORKS.items()}
    scores |= {"1 - OCR confidence": 1 - confidence, "1 - NED": 1 - np.array(similar)}
    kept = [letter for letter, is_right in zip(letters, right, strict=True) if is_right]
    defects = [letter.defect for letter in letters]
    if missing := {None, *STRUCTURAL} - set(defects):
        raise SystemExit(f"--letters: {len(letters)} letters have none of {missing}; give some hundreds")
    return {
        "count": len(letters),
        "fonts": names_of(TEST_FONTS),
        "auc": {name: aucs(letters, values) for name, values in scores.items()},
        "auc_read_as_asked": {name: aucs(kept, values[right])["all"] for name, values in scores.items()},
        "found_at_5_percent": {name: round(found_at(letters, values), 4) for name, values in scores.items()},
        "read_as_asked": {
            str(kind): round(float(right[[d == kind for d in defects]].mean()), 4) for kind in (None, *STRUCTURAL)
        },
    }


def found_at(letters: Sequence[Letter], values: Values, alarms: float = 0.05) -> float:
    """Share of broken letters above the value that `alarms` of the whole ones exceed."""
    whole = np.array([letter.defect is None for letter in letters])
    return float((values[~whole] > np.quantile(values[whole], 1 - alarms)).mean())


def of_words(reader: OcrScorer, count: int) -> Report:
    """Areas of words with one broken letter against whole words, by the scorers as a run would have them."""
    fonts = names_of(TEST_FONTS)
    broken = [None if i % 2 == 0 else STRUCTURAL[i // 2 % len(STRUCTURAL)] for i in range(count)]
    words = [draw_word(fonts, derive_seed("benchmark word", i), defect) for i, defect in enumerate(broken)]
    items = [RewardItem(i, "", word.pixels, metadata={"text": word.text}) for i, word in enumerate(words)]
    report: Report = {"count": count, "auc": {}, "failed": {}}
    overs: tuple[Literal["mean", "worst_quarter"], ...] = ("mean", "worst_quarter")
    for (name, network), over in product(NETWORKS.items(), overs):
        scorer = GlyphStructureReward(detect=False, threads=1, over=over, network=network).make()
        scorer.load("cpu")
        outcomes = scorer.score(items)
        report["failed"][f"{name}, {over}"] = sum(not isinstance(o, Score) for o in outcomes)
        scored = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Score)]
        values = np.array([1 - o.value for o in outcomes if isinstance(o, Score)])
        report["auc"][f"{name}, {over}"] = area([words[i] for i in scored], values)
    read = reader.read([word.pixels for word in words])
    report["auc"]["1 - OCR confidence"] = area(words, 1 - np.array([value for _, value in read]))
    neds = [text_similarity(text, word.text) for (text, _), word in zip(read, words, strict=True)]
    report["auc"]["1 - NED"] = area(words, 1 - np.array(neds))
    return report


def area(words: Sequence[Word], values: Values) -> float:
    broken = np.array([word.defect is not None for word in words])
    return round(auc(values[broken], values[~broken]), 4)


# --- attacks ---

Objective = Callable[[NDArray[np.float32]], float]


def objectives(reader: OcrScorer) -> dict[str, Objective]:
    """Reward -> its value for an image [H, W, 3] in [0, 1]."""

    def structure(variant: Variant, image: NDArray[np.float32]) -> float:
        with torch.no_grad():
            return float(differentiable(torch.from_numpy(image).permute(2, 0, 1)[None], variant))

    def read(image: NDArray[np.float32]) -> tuple[str, float]:
        return reader.read([pixels_of(image)])[0]

    def ned(image: NDArray[np.float32]) -> float:
        return text_similarity(read(image)[0], TEXT)

    return {
        **{name: functools.partial(structure, variant) for name, variant in NETWORKS.items()},
        "OCR confidence": lambda image: read(image)[1],
        "NED": ned,
        "NED x glyph_structure": lambda image: ned(image) * structure("standard", image),
    }


def differentiable(images: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Mean over the letters of the text, in equal slices of the image."""
    height, width = SIZE
    boxes = [(0, box) for box in equal_slices((0, 0, width, height), len(TEXT))]
    return structure_of(images, boxes, [LETTERS.index(c) for c in TEXT], packaged(variant=variant)).mean()


def attacks(reader: OcrScorer, steps: int, seeds: Sequence[int]) -> tuple[list[Report], dict[str, NDArray[np.uint8]]]:
    """Every attack: means over seeds of all values before and after; and the images of the first seed."""
    measures = objectives(reader)
    ways: dict[str, Callable[[NDArray[np.float32], int], NDArray[np.float32]]] = {
        "none": lambda image, seed: image,
        **{f"{name}, gradient": functools.partial(_climbed, variant, steps) for name, variant in NETWORKS.items()},
    }
    for name, objective in measures.items():
        ways[f"{name}, evolution"] = functools.partial(_evolved, objective, steps)
    rows, images = list[Report](), dict[str, NDArray[np.uint8]]()
    for name, way in ways.items():
        values: list[dict[str, float]] = []
        for seed in seeds:
            start = np.random.default_rng(derive_seed("attack", seed)).random((*SIZE, 3)).astype(np.float32)
            final = way(start, seed)
            images.setdefault(name, pixels_of(final))
            mask = np.full(SIZE, 255, np.uint8)
            likeness = {"glyph correlation": glyph_correlation(pixels_of(final), mask, TEXT)}
            values.append({measure: value(final) for measure, value in measures.items()} | likeness)
        rows.append({"attack": name, **{key: round(fmean(v[key] for v in values), 4) for key in values[0]}})
    return rows, images


def _climbed(variant: Variant, steps: int, image: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    return by_gradient(image, variant, steps)


def by_gradient(image: NDArray[np.float32], variant: Variant, steps: int, lr: float = 0.05) -> NDArray[np.float32]:
    """Adam on the pixels."""
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].requires_grad_()
    optimizer = torch.optim.Adam([pixels], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (-differentiable(pixels, variant)).backward()
        optimizer.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return pixels.detach()[0].permute(1, 2, 0).numpy()


def _evolved(objective: Objective, steps: int, image: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    return by_evolution(image, objective, steps, derive_seed("evolution", seed))


def by_evolution(
    image: NDArray[np.float32], objective: Objective, steps: int, seed: int, pairs: int = 6, cells: int = 4
) -> NDArray[np.float32]:
    """Natural evolution strategies with antithetic pairs on noise of `cells` x `cells` pixels; the best image seen."""
    draw = np.random.default_rng(seed)
    height, width = SIZE
    best, best_value = image, objective(image)
    for _ in range(steps):
        noise = draw.normal(0, 0.15, (pairs, height // cells, width // cells, 3)).astype(np.float32)
        noise = noise.repeat(cells, 1).repeat(cells, 2)
        values = np.zeros((pairs, 2))
        for i in range(pairs):
            for j, sign in enumerate((1, -1)):
                tried = np.clip(image + sign * noise[i], 0, 1)
                values[i, j] = objective(tried)
                if values[i, j] > best_value:
                    best, best_value = tried, float(values[i, j])
        slope = values[:, 0] - values[:, 1]
        if not np.abs(slope).max():  # a plateau: walk on at random
            slope = draw.normal(0, 1, pairs)
        step = np.tensordot(slope / (np.abs(slope).mean() + 1e-9), noise, 1) / pairs
        image = np.clip(image + step.astype(np.float32), 0, 1)
    return best


def pixels_of(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.rint(image * 255).astype(np.uint8)


def picture(images: dict[str, NDArray[np.uint8]], out: Path) -> None:
    """The images in two columns, twice their size, with the names of the attacks."""
    width, height = 2 * SIZE[1] + 16, 2 * SIZE[0] + 30
    page = Image.new("RGB", (2 * width, -(-len(images) // 2) * height), "white")
    draw = ImageDraw.Draw(page)
    for i, (name, pixels) in enumerate(images.items()):
        x, y = i % 2 * width + 8, i // 2 * height
        draw.text((x, y + 6), name, fill="black")
        page.paste(Image.fromarray(pixels).resize((2 * SIZE[1], 2 * SIZE[0]), Image.Resampling.NEAREST), (x, y + 24))
    out.parent.mkdir(parents=True, exist_ok=True)
    page.quantize(96).save(out, optimize=True)


if __name__ == "__main__":
    main()
