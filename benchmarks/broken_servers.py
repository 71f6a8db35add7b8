"""Two reward servers, one sound and one broken: is every item scored, and at what cost?

The sound server scores one item after the other, 20 ms each, as a GPU would. The broken one answers faster than it, in
one of the ways of `WAYS`, and looks ready: a client that gives credit for fast replies sends it everything.

items: for every way a client scores 10,000 items in calls of 64, and then the sound server alone scores 1,000.
Counted are the scores that are those of the stub, the requests of both servers, and the throughput from a minute after
the breaker of the broken server opened to the end.

runs: a tiny run whose reward is on both servers, started four times with resume=auto, in every way.

    OMP_NUM_THREADS=1 python benchmarks/broken_servers.py --out benchmarks/results/broken_servers.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ITEM_S = 0.020
REWARD = "jpeg_size"
CALL = 64
"""Items of one call of the client, as of an epoch; each waits for its slowest request."""

Reply = dict[str, Any]


def value_of(prompt: str) -> float:
    """The score of an item by both servers: another item's score would be seen."""
    return -int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48


# --- the stub ---


class Stub(ThreadingHTTPServer):
    """A reward server whose scorer sleeps; a way changes its answer to `POST /score`.

    Attributes:
        requests: that reached `/score`.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, way: Callable[[_Request], None], item_s: float = 0.0) -> None:
        self.way = way
        self.item_s = item_s
        self.requests = 0
        self.closing = threading.Event()
        self._one_at_a_time = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def scored(self, manifest: dict[str, Any]) -> Reply:
        """The sound reply, after the time that it takes."""
        with self._one_at_a_time:
            time.sleep(self.item_s * len(manifest["items"]))
        names = manifest["rewards"]
        rows = [
            {"id": one["id"], "scores": {name: {"value": value_of(one["prompt"])} for name in names}}
            for one in manifest["items"]
        ]
        return {"items": rows, "scorers": {name: {"revision": "1"} for name in names}}


class _Request(BaseHTTPRequestHandler):
    server: Stub  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    manifest: dict[str, Any]

    def do_POST(self) -> None:
        from retouch.rewards.wire import parse_multipart

        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            parts = parse_multipart(body, self.headers["Content-Type"], 10_000)
        except ValueError:  # the caller hung up half-way
            self.close_connection = True
            return
        self.manifest = json.loads(parts["manifest"][0])
        self.server.requests += 1
        self._guarded(self.server.way)

    def do_GET(self) -> None:
        if self.server.way in (html, refused_as_unknown):
            return self._guarded(self.server.way)
        if self.path == "/readyz":
            return self._guarded(lambda one: one.reply({"status": "ready"}))
        scorers = {REWARD: {"range": [-1, 0], "needs": [], "revision": "1", "licence": "-"}}
        return self._guarded(lambda one: one.reply({"protocol": 1, "scorers": scorers}))

    def _guarded(self, way: Callable[[_Request], None]) -> None:
        with contextlib.suppress(OSError):  # the client may have left
            way(self)

    def scored(self) -> Reply:
        return self.server.scored(self.manifest)

    def reply(self, body: Any, status: int = 200, **headers: str) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None: ...


# --- the ways ---


def sound(one: _Request) -> None:
    one.reply(one.scored())


def raises(one: _Request) -> None:
    """Every batch, as after an error that spoils the state of a GPU."""
    error = {"code": "scorer_error", "message": "CUDA error: device-side assert triggered", "retryable": False}
    rows = [{"id": i["id"], "errors": dict.fromkeys(one.manifest["rewards"], error)} for i in one.manifest["items"]]
    one.reply({"items": rows, "scorers": {}})


def one_of_two_raises(one: _Request) -> None:
    """One reward of several."""
    reply = one.scored()
    name = one.manifest["rewards"][-1]
    for row in reply["items"]:
        del row["scores"][name]
        row["errors"] = {name: {"code": "scorer_error", "message": "no", "retryable": False}}
    one.reply(reply)


def loses_every_worker(one: _Request) -> None:
    error = {"code": "worker_lost", "message": "the worker ended", "retryable": True}
    rows = [{"id": i["id"], "errors": dict.fromkeys(one.manifest["rewards"], error)} for i in one.manifest["items"]]
    one.reply({"items": rows, "scorers": {}})


def html(one: _Request) -> None:
    """A port that belongs to something else."""
    one.reply(b"<html><body>It works!</body></html>")


def empty(one: _Request) -> None:
    one.reply(b"")


def hangs_after_headers(one: _Request) -> None:
    one.send_response(200)
    one.send_header("Content-Length", "1000")
    one.end_headers()
    one.server.closing.wait()
    one.close_connection = True


def trickles(one: _Request) -> None:
    """A byte every tenth of a second."""
    one.send_response(200)
    one.send_header("Content-Length", "100000")
    one.end_headers()
    while not one.server.closing.wait(0.1):
        one.wfile.write(b" ")


def wrong_ids(one: _Request) -> None:
    reply = one.scored()
    one.reply({**reply, "items": [{**row, "id": row["id"] + 1} for row in reply["items"]]})


def half_of_the_items(one: _Request) -> None:
    reply = one.scored()
    one.reply({**reply, "items": reply["items"][: len(reply["items"]) // 2]})


def other_names(one: _Request) -> None:
    """Scores of a reward that was not requested."""
    reply = one.scored()
    one.reply({**reply, "items": [{"id": row["id"], "scores": {"other": {"value": 0.0}}} for row in reply["items"]]})


def nan(one: _Request) -> None:
    reply = one.scored()
    for row in reply["items"]:
        for score in row["scores"].values():
            score["value"] = math.nan
    one.reply(json.dumps(reply).encode())


def out_of_range(one: _Request) -> None:
    reply = one.scored()
    for row in reply["items"]:
        for score in row["scores"].values():
            score["value"] = 7.0
    one.reply(reply)


def truncated(one: _Request) -> None:
    one.reply(json.dumps(one.scored()).encode()[:-40])


def cut_off(one: _Request) -> None:
    """The connection ends within the reply."""
    payload = json.dumps(one.scored()).encode()
    one.send_response(200)
    one.send_header("Content-Length", str(len(payload)))
    one.end_headers()
    one.wfile.write(payload[:20])
    one.close_connection = True


def refused_as_unknown(one: _Request) -> None:
    one.reply({"detail": "Not Found"}, 404)


def wants_a_token(one: _Request) -> None:
    one.reply({"error": "a bearer token is required"}, 401)


def error_500(one: _Request) -> None:
    one.reply(b"Internal Server Error", 500)


def redirects(one: _Request) -> None:
    one.reply(b"", 307, Location="http://127.0.0.1:9/score")


WAYS: dict[str, Callable[[_Request], None] | None] = {
    "raises": raises,
    "HTML": html,
    "empty 200": empty,
    "hangs after headers": hangs_after_headers,
    "wrong ids": wrong_ids,
    "refuses": None,  # nobody listens
}
"""The ways that are measured; None: the port is closed."""

MORE_WAYS: dict[str, Callable[[_Request], None]] = {
    "one of two raises": one_of_two_raises,
    "loses every worker": loses_every_worker,
    "trickles": trickles,
    "half of the items": half_of_the_items,
    "other names": other_names,
    "NaN": nan,
    "out of range": out_of_range,
    "truncated": truncated,
    "cut off": cut_off,
    "404": refused_as_unknown,
    "401": wants_a_token,
    "500": error_500,
    "redirects": redirects,
}
"""Those that only the tests try."""


@contextlib.contextmanager
def broken(way: Callable[[_Request], None] | None) -> Iterator[tuple[str, Callable[[], int]]]:
    """A broken server -> its address, and the number of its requests so far."""
    if way is None:
        with socket.socket() as held:  # bound, so that nobody else gets the port
            held.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{held.getsockname()[1]}", lambda: 0
        return
    with Stub(way) as stub:
        yield stub.url, lambda: stub.requests


# --- items ---


def items(count: int, start: int = 0) -> list[Any]:
    from retouch.rewards.protocol import RewardItem

    pixels = np.zeros((8, 8, 3), np.uint8)
    return [RewardItem(i, f"item {i}", pixels) for i in range(start, start + count)]


def right(batch: Sequence[Any], outcomes: Sequence[Any]) -> int:
    """How many items have their own score."""
    return sum(getattr(o, "value", None) == value_of(one.prompt) for one, o in zip(batch, outcomes, strict=True))


def trial(way: str, count: int, alone: int) -> dict[str, Any]:
    """Score `count` items with a broken server beside the sound one, then `alone` items on the sound one."""
    from retouch.rewards.client.client import RewardClient

    with contextlib.ExitStack() as stack:
        good = stack.enter_context(Stub(sound, ITEM_S))
        url, reached = stack.enter_context(broken(WAYS[way]))
        client = stack.enter_context(RewardClient([url, good.url], [REWARD]))
        bad = client._balancer.servers[0]
        done, scored, opened = list[tuple[float, int]](), 0, math.nan
        started = time.monotonic()
        for start in range(0, count, CALL):
            batch = items(min(CALL, count - start), start)
            scored += right(batch, client.score(batch)[REWARD])
            now = time.monotonic()
            done.append((now, len(batch)))
            if math.isnan(opened) and not bad.sound:
                opened = now
        late = [(at, n) for at, n in done if at >= opened + 60]
        statistics = client.statistics
        only = stack.enter_context(RewardClient([good.url], [REWARD]))
        begun, batches = time.monotonic(), range(0, alone, CALL)
        for start in batches:
            only.score(items(CALL, start))
        rate_alone = CALL * len(batches) / (time.monotonic() - begun)
    found: dict[str, Any] = {
        "items": count,
        "scored": scored,
        "seconds": round(done[-1][0] - started, 1),
        "breaker_opened_after_s": round(opened - started, 2),
        "requests_of_the_broken_server": reached(),
        "requests": statistics.requests,
        "attempts": statistics.attempts,
        "items_per_s_alone": round(rate_alone, 2),
    }
    if len(late) > 1:
        rate = sum(n for _, n in late[1:]) / (late[-1][0] - late[0][0])
        found |= {"items_per_s_later": round(rate, 2), "share_of_alone": round(rate / rate_alone, 3)}
    return found


# --- runs ---


def run_file(urls: Sequence[str], data: Path, runs: Path) -> dict[str, Any]:
    """A GRPO run of four epochs on the smallest network, whose reward is on the servers."""
    from kill import run_file as killed

    run = killed("grpo", data, runs)
    run["rewards"] = {REWARD: {"url": list(urls)}}
    return run


def _serve_stub(way: str, pipe: Any) -> None:
    """A stub in a process of its own: this one is forked for the runs, and has no other thread."""
    with Stub(WAYS.get(way) or sound) as stub:
        pipe.send(stub.url)
        pipe.recv()


@contextlib.contextmanager
def stub_process(way: str) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_stub, args=(way, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(5)
        process.kill()


def restarts(way: str, work: Path) -> dict[str, Any]:
    """Start a run and restart it three times against a sound and a broken server -> exit codes, and the seconds.

    Every start has two more steps to do than the one before.
    """
    from kill import Process, import_as

    codes, seconds = list[int | None](), list[float]()
    broken_one = broken(None) if WAYS[way] is None else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(stub_process("sound"))
        closed = stack.enter_context(broken_one)
        url = closed[0] if closed else stack.enter_context(stub_process(way))
        name = way.replace(" ", "_")
        file, log = work / f"{name}.yaml", work / f"{name}.log"
        for start in range(4):
            run = run_file([url, good], work / "data", work / "runs" / name)
            run["training"]["max_steps"] = 2 * (start + 1)
            file.write_text(yaml.safe_dump(run))
            process = Process(file, name, log)
            codes.append(process.wait(900))
            seconds.append(round(time.monotonic() - process.started, 1))
            import_as(log)
            if codes[-1] != 0:
                print(log.read_text()[-2000:], file=sys.stderr)
    return {"exit_codes": codes, "seconds": seconds}


def table(found: Mapping[str, Any]) -> str:
    """One line for each way of being broken, as markdown."""
    lines = ["| the other server | images scored | requests it got | share |", "|---|---|---|---|"]
    for way, one in found["items"].items():
        asked, share = one["requests_of_the_broken_server"], one["share_of_alone"]
        lines.append(f"| {way} | {one['scored']:,} | {asked} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--alone", type=int, default=1_024)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, required=True, help="JSON; ways that it has are not repeated")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from kill import write_data

    from retouch.observe.environment import environment

    content = json.loads(given.out.read_text()) if given.out.exists() else {"items": {}, "restarts": {}}

    def write() -> None:
        about = {key: environment()[key] for key in ("python", "packages", "platform")}
        given.out.write_text(json.dumps({**content, **about}, indent=1) + "\n", encoding="utf-8")

    for way in given.ways:
        if way not in content["items"]:
            content["items"][way] = trial(way, given.items, given.alone)
            print(way, json.dumps(content["items"][way]), flush=True)
            write()
    with tempfile.TemporaryDirectory(prefix="retouch-broken-") as folder:
        work = Path(folder)
        if any(way not in content["restarts"] for way in given.ways):
            write_data(work / "data")
        for way in given.ways:
            if way not in content["restarts"]:
                content["restarts"][way] = restarts(way, work)
                print(way, json.dumps(content["restarts"][way]), flush=True)
                write()


if __name__ == "__main__":
    main()
