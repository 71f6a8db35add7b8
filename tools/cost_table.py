"""Write docs/costs.md: what every run file for a released model costs.

python tools/cost_table.py            # write docs/costs.md
python tools/cost_table.py --print    # print it

The numbers are those of `retouch check`: no download, no weights.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from retouch.config import ConfigError, RunConfig, load_run
from retouch.config.cost import SECONDS_A_QUESTION, Cost, cost
from retouch.rewards.judge import DEFAULT_PRICES
from retouch.rewards.scorers.reading import SECONDS_A_PAGE

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/costs.md"

GPUS = 8
IN, OUT = DEFAULT_PRICES

GPUS_OF = {"reproduce/flow_grpo_sd35m_ocr": 32, "reproduce/flow_grpo_sd35m_pickscore": 32}
"""Files whose published run had another number."""

GIVEN = {"JUDGE_URL": "https://api.openai.com/v1", "JUDGE_MODEL": "auto"}
"""Values of variables without which a file is not read; of any other it is a path, which is not looked at."""

COLUMNS = (
    "file", "images an epoch", "in the run", "forwards an image", "TFLOP a forward", "GPU hours", "per 100 steps",
    "s an epoch", "judge", "servers", "disk",
)  # fmt: skip

UNSET = re.compile(r"\$\{(\w+)\} is not set")

HEAD = f"""# What a run costs

`retouch check RUN.yaml` prints what a run file will cost, and `retouch train` logs it before the first step:

```console
$ retouch check configs/flux_fill_grpo.yaml --world-size 8 --gpu h100
```

The table has every run file for a released model, on {GPUS} GPUs of kind H200 (`reproduce/flow_grpo_*`: 32, as
published). `python tools/cost_table.py` writes this page from what `retouch check` computes.

| {" | ".join(COLUMNS)} |
{"|---" * len(COLUMNS)}|
"""

TAIL = f"""
- **No number of this table is of a trained released model.** FLOPs are counted; the time of a step with random weights
  was measured on one H200 for FLUX.1-Fill, Qwen-Image and Stable Diffusion 1.5 at 512 x 512
  ([Scaling](scaling.md#measured)). Hours that follow from these rates are as good as a step is like those steps; those
  marked * take the rate of a kindred network, or a fifth of the GPU's peak, and may be off by half.
- **forwards an image**: sampling, evaluation of ratios and references, and training. A backward is one forward where
  the network is frozen, else two; recomputed activations are one more. `forwards per image` of `check --verbose` counts
  every backward as two.
- **GPU hours** are the sum over all GPUs for `training.max_steps`, evaluations included: the upper bound of a run that
  is stopped when it is good enough. With another `--gpu` the rate is the same share of its peak. Text encoders, the
  autoencoder and the optimizer are in the measured rates; waiting for rewards, for other processes and for a text
  encoder that is trained is not.
- **judge**: requests of the whole run, and dollars: by `price_in` and `price_out`, or at OpenAI by the list price of
  its default model ({IN:g} and {OUT:g} dollars per million tokens), with tokens of images by its rule and estimated
  texts. `rewards.NAME.budget_dollars` ends a run before. At an address of your own it costs GPUs.
- **servers**: reward servers that the run would not wait for: seconds of scoring over seconds of sampling in an epoch.
  Text of an image of 512 x 512 is read in {SECONDS_A_PAGE:g} s on one core (`benchmarks/reading_time.py`).
  `RUN_FILE=RUN.yaml GPUS=8 scripts/run_server.sh` starts this number, at most one for each core; set
  `rewards.NAME.url=runs/endpoints.json` then. Judges are assumed to answer in {SECONDS_A_QUESTION:g} s, and
  `retouch check` prints how many questions must be open at once.
- **disk**: checkpoints that are kept. Style adapters are counted by `retouch doctor`.
"""


def files() -> list[Path]:
    """Run files for released models."""
    return sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "configs/reproduce").glob("*.yaml"))


def read(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A run file as it is without an environment, except for what it needs from there."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        while True:
            try:
                return load_run(path, overrides)
            except ConfigError as error:
                unset = UNSET.search(str(error))
                if unset is None:
                    raise
                os.environ[unset[1]] = GIVEN.get(unset[1], "a/path")
    finally:
        os.environ.clear()
        os.environ.update(before)


def page() -> str:
    """The content of docs/costs.md."""
    return HEAD + "".join(f"{line}\n" for line in lines()) + TAIL


def lines() -> Iterator[str]:
    for path in files():
        run = read(path)
        name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
        yield f"| {' | '.join((name, *cells(run, cost(run, GPUS_OF.get(name, GPUS)))))} |"


def cells(run: RunConfig, known: Cost) -> Iterator[str]:
    f = known.forwards
    yield f"{known.images_per_epoch:,}" if known.images else "-"
    yield f"{max(known.images, known.supervised_rows):,.0f}"
    yield f"{f.sampling:g} + {f.ratios:g} + {f.training:g}"
    yield "?" if known.tflop_per_forward is None else f"{known.tflop_per_forward:.3g}"
    star = "" if known.measured else "*"
    hours = known.gpu_hours
    yield "?" if hours is None else f"{hours:,.0f}{star}"
    yield "?" if hours is None else short(100 * hours / run.training.max_steps)
    yield f"{known.epoch_seconds:,.0f}" if known.epoch_seconds else "-"
    yield "; ".join(judges(known)) or "-"
    yield str(known.replicas) if known.scored else "-"
    size = known.checkpoint_bytes
    yield "?" if size is None else f"{known.checkpoints * size / 2**30:,.0f} GiB"


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def judges(known: Cost) -> Iterator[str]:
    for one in known.judges.values():
        dollars = "" if not one.dollars else f", ${one.dollars:,.0f}"
        yield f"{one.requests:,.0f}{dollars}"


def main() -> None:
    if "--print" in sys.argv[1:]:
        print(page(), end="")
        return
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
