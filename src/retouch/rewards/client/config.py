"""Section `reward_client` of a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.base import Count, NonNegative, Positive, Section, Unit
from retouch.config.reads import ReadBy, ReadIf

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

Balance = Literal["least_outstanding", "round_robin"]

COLLECTIVE_S = 7200.0
"""Minimum timeout of a collective; NCCL's default of ten minutes is less than writing a large checkpoint takes."""


PROBED = ReadIf(
    "with `probe_every` above 0",
    lambda own: own.probe_every,
    "but reward_client.probe_every is 0: nothing is probed; set probe_every, or leave it out",
    warns=True,
)


class RewardClientConfig(Section):
    """How the run talks to reward servers."""

    RETIRED: ClassVar[Mapping[str, object]] = {"hedge_after_s": None}

    timeout_s: Positive = 60.0
    """Deadline of one request in seconds, retries included."""
    outage_wait_s: NonNegative = 300.0
    """Seconds to wait for servers that stopped answering before the run stops, resumable (exit 3). At the start of a
    run at least a minute, because servers may still be loading."""
    logged_wait_s: NonNegative = 5.0
    """Seconds that rewards of weight 0, which are only logged, may take once the other rewards of an epoch are in."""
    max_failure_rate: Unit = 0.2
    """If more than this fraction of an epoch's samples, over all processes, miss a weighted reward, the run stops,
    resumable (exit 3): such samples cannot be trained on."""
    max_run_failure_rate: Unit = 1.0
    """The same limit over all samples of the run, once there were 200: it catches a low but steady failure rate."""
    batch_size: Count = 16
    """Images per request."""
    balance: Balance = "least_outstanding"
    """How one of several servers is chosen: the one expected to answer first, by its open requests and its latency; or
    each in turn."""
    requests_per_server: Count = 4
    """Open requests per server; further requests wait in the client for the first free server."""
    probe_every: Annotated[int, Field(ge=0), ReadBy("epochs", anew=True)] = 0
    """Epochs between probes: the same two images are scored again and compared with their scores at the start of the
    run. 0 disables probes; a paid judge charges for them."""
    probe_tolerance: Annotated[NonNegative, PROBED] = 1e-3
    """Largest difference between probes (absolute up to scores of 1, relative above)."""
    on_drift: Annotated[Literal["warn", "stop"], PROBED] = "warn"
    """Action if a probe differs by more: log a warning, or stop the run, resumable (exit 3)."""
    cache: bool = False
    """Keep the scores of servers in RUN/rewards.sqlite; a resumed run does not request them again. Each of several
    machines has its own file. `retouch eval` has no such file; with `--benchmark` the scores in OUT/observations
    are not requested again."""

    def warnings(self, run: RunConfig) -> Iterator[str]:
        for name, entry in run.rewards.items():
            question_s = getattr(entry, "timeout_s", 0.0) if entry.url == "auto" else 0.0
            if question_s > self.timeout_s:
                yield (
                    f"reward_client.timeout_s: given {self.timeout_s:g}, but rewards.{name}.timeout_s gives a question "
                    f"{question_s:g} s: an answer after the end of its request is a failure; set "
                    f"reward_client.timeout_s={question_s:g} or more"
                )

    @property
    def collective_s(self) -> float:
        """Timeout in seconds of a collective: one process may be waiting for rewards meanwhile."""
        return max(COLLECTIVE_S, 2 * (self.timeout_s + self.outage_wait_s))
