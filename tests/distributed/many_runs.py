"""Several runs of `retouch` in one pair of processes: `torchrun -m tests.distributed.many_runs '[[run, ...], ...]'`.

Each run is the arguments of the command line behind a list of faults, any of

    slow    the rewards of the last process come late
    flat    all images of the first half of four groups score the same
    raise   the last process fails in its third backward

At the end every process writes what it holds to `rank-N.json` of the run directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from retouch.cli import app
from retouch.data.sampler import epoch_examples
from retouch.engine import Engine
from retouch.engine.sharding import piece
from retouch.rewards.scorers.preservation import PreservationScorer
from retouch.training.session import Session
from retouch.types import Score
from tests.distributed.scores import coarse

torch.set_num_threads(1)

RANK = int(os.environ.get("RANK", 0))
LAST = int(os.environ.get("WORLD_SIZE", 1)) - 1 == RANK
score, backward, finish, close = coarse(PreservationScorer.score), Engine.backward, Session.finish, Engine.close
micro_step = Engine.micro_step
faults: set[str] = set()
backwards = exchanges = 0


def score_with_faults(self: Any, items: Any) -> Any:
    if "slow" in faults and LAST:
        time.sleep(1.5)
    if "flat" not in faults:
        return score(self, items)
    dead = {100 + position for position in epoch_examples(8, 4, 5, 0)[:2]}
    # brightness differs between two images of a group by more than four digits hide
    return [Score(0.5 if item.group in dead else round(float(item.image.mean()) / 255, 4)) for item in items]


def counted(self: Engine, loss: Any) -> None:
    global backwards
    backwards += 1
    if "raise" in faults and LAST and backwards == 3:
        raise RuntimeError("this process fails on purpose")
    backward(self, loss)


def counted_where_last(self: Engine, *, last: bool) -> Any:
    global exchanges
    exchanges += last
    return micro_step(self, last=last)


def finish_and_tell(self: Session) -> None:
    finish(self)
    run = self.run
    moments = [t for entry in run.engine.optimizer.state.values() for t in (entry["exp_avg"], entry["exp_avg_sq"])]
    held = {
        "trained": run.policy.size,
        "weights": sum(t.numel() for t in run.policy.state().values()),
        "snapshots": {name: sum(t.numel() for t in run.policy.state(name).values()) for name in run.policy.snapshots},
        "moments": sum(piece(t).numel() for t in moments),
        "backwards": backwards,
        "exchanges": exchanges,
    }
    (run.dir.path / f"rank-{RANK}.json").write_text(json.dumps(held), encoding="utf-8")


def main() -> None:
    global backwards, exchanges
    Engine.micro_step = counted_where_last
    PreservationScorer.score, Engine.backward, Session.finish = score_with_faults, counted, finish_and_tell
    Engine.close = lambda self: None  # the processes stay one group until the last run is over
    for wanted, *arguments in json.loads(sys.argv[1]):
        faults.clear()
        faults.update(wanted)
        backwards = exchanges = 0
        code = app(arguments, standalone_mode=False)
        if code:
            sys.exit(code)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
