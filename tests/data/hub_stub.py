"""A hub of one data set on 127.0.0.1: as much of the API as huggingface_hub and datasets ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStub:
    """Serves `files` (path in the repository -> bytes) of the data set `repository` at `COMMIT`, and of no other
    revision.

    Attributes:
        asked: (method, path) of every request.
    """

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository, self.files = repository, files
        self.asked: list[tuple[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                stub.answer(self, body=False)

            def do_GET(self) -> None:
                stub.answer(self, body=True)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.answer(self, body=True)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path))
        found = self._file(path)
        if found is not None:
            headers = {"ETag": f'"{hashlib.sha1(found).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._reply(request, 200, found, headers, body=body)
        elif path == "/":
            self._reply(request, 200, b"", {}, body=body)
        elif (info := self._info(path)) is not None:
            self._reply(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body=body)
        else:
            known = path.startswith((f"/datasets/{self.repository}/", f"/api/datasets/{self.repository}/"))
            code = (
                "EntryNotFound" if known and f"/{COMMIT}" in path else "RevisionNotFound" if known else "RepoNotFound"
            )
            self._reply(request, 404, b"", {"X-Error-Code": code, "X-Error-Message": "not here"}, body=body)

    def _file(self, path: str) -> bytes | None:
        head = f"/datasets/{self.repository}/resolve/{COMMIT}/"
        return self.files.get(path.removeprefix(head)) if path.startswith(head) else None

    def _info(self, path: str) -> Any:
        head = f"/api/datasets/{self.repository}"
        if path in (head, f"{head}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            return {
                "_id": "1",
                "id": self.repository,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
        tree = f"{head}/tree/{COMMIT}"
        if path == tree or path.startswith(tree + "/"):
            folder = path.removeprefix(tree).strip("/")
            return [self._entry(name) for name in self.files if name.startswith(folder)]
        if path == f"{head}/paths-info/{COMMIT}":
            return [self._entry(name) for name in self.files]
        return None

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    @staticmethod
    def _reply(
        request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], *, body: bool
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)
