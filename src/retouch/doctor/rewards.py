"""Start or connect every reward as the run would, and score one image with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from retouch.config import ConfigError, RunConfig
from retouch.data.base import DataError, ItemFiles
from retouch.doctor.line import Line
from retouch.errors import RewardOutage
from retouch.rewards.addresses import start_servers
from retouch.rewards.base import RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.devices import own_device
from retouch.rewards.golden import golden_items
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import RewardTable
from retouch.types import Failure

_LOADING_S = 120.0
"""Timeout in seconds for scorers that `doctor` starts."""

_SERVER_S = 5.0
"""Timeout in seconds for servers that should be running."""


def needed_extras(run: RunConfig) -> set[str]:
    """Extras that the run needs on this machine."""
    here = [entry for entry in run.rewards.values() if entry.is_made_here]
    extras = {"train"}.union(*(entry.extras() for entry in here))
    extras |= {"vlm"} if run.algorithm.trains_text_encoder else set()
    extras |= {"deepspeed"} if run.training.sharding.startswith("zero") else set()
    extras |= {"quantize"} if run.model.quantize == "nf4" else set()
    extras |= {"wandb", "trackio"} & {*run.logging.sinks}
    return extras | ({"serve"} if any(entry.url == "auto" for entry in here) else set())


def reward_lines(run: RunConfig) -> Iterator[Line]:
    """One line for each reward; a failure of a reward that is only logged is a warning."""
    items = _items(run)
    for name, entry in run.rewards.items():
        shown = items if entry.compares_group() else items[:1]
        problem = _problem(name, entry, run.reward_client, shown)
        where = "in this process" if entry.url is None else str(entry.url)
        if problem is None:
            yield Line("ok", f"reward {name}", f"{where}: ready, and scored {_IMAGES[len(shown)]}")
        else:
            yield Line("fix" if entry.weight or entry.gradient_weight else "warning", f"reward {name}", problem)


_IMAGES = {1: "an image", 2: "two images of a group"}


def _items(run: RunConfig) -> list[RewardItem]:
    """Golden images as a group, with the metadata that the run's examples have beside their own, which scorers of the
    user read."""
    try:
        first = next((item for item in run.data.items() if isinstance(item, ItemFiles)), None)
    except (DataError, ConfigError, OSError):  # reported with the data
        first = None
    of_the_run = {} if first is None else {key: value for key, value in first.metadata.items() if key != "lines"}
    return [replace(golden, group=0, metadata={**of_the_run, **golden.metadata}) for golden in golden_items()]


def _problem(name: str, entry: RewardEntry, client: RewardClientConfig, items: Sequence[RewardItem]) -> str | None:
    """Reason why a reward cannot score; None if it can."""
    try:
        # a table does not wait for what has weight 0, and its gate is not here
        alone = entry.model_copy(update={"weight": 1.0, "role": "train", "gated_by": None})
        table = RewardTable({name: alone}, client, None, own_device())
    except ConfigError as error:
        return str(error)
    try:
        table.start()
        asks_s = getattr(entry, "timeout_s", 0.0)  # a judge is loaded once it has answered a first question
        problems = table.wait_ready(_LOADING_S + asks_s if entry.is_made_here else _SERVER_S)
        if problems:
            return f"{'; '.join(problems)}; {_remedy(name, entry)}"
        outcomes = table.submit(items).result().outcomes[name]
    except (ConfigError, RewardOutage) as error:
        return str(error)
    except Exception as error:  # loading a scorer may raise whatever its library does
        return f"{type(error).__name__}: {error}; {_remedy(name, entry)}"
    finally:
        table.close()
    failed = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failed is None:
        return None
    return f"ready, but it did not score {_IMAGES[len(items)]}: {failed.code}: {failed.message}"


def _remedy(name: str, entry: RewardEntry) -> str:
    if entry.is_made_here:
        serve = "" if entry.compares_group() else f", and try `retouch reward serve {entry.scorer}`"
        return f"see the line of the extra{serve}"
    return start_servers([name])
