"""A LitServe app with its batching on, for rewards.py to compare with: `python litserve_app.py PORT REWARD`.

A file of its own, because LitServe sends the class to its workers by name, and reads the annotation of what it
decodes, which must be no string.
"""

import base64
import sys
from typing import Any

import litserve  # pyright: ignore[reportMissingImports]
from fastapi import Request

from rewards import item_of, scorer_of


class Api(litserve.LitAPI):  # pyright: ignore[reportUnknownMemberType, reportUntypedBaseClass]
    """Pictures as base64 of raw pixels in JSON."""

    reward = ""

    def setup(self, device: str) -> None:
        self.scorer = scorer_of(self.reward)

    def decode_request(self, request: Request) -> Any:  # by now a dictionary
        return item_of(base64.b64decode(request["body"]))  # pyright: ignore[reportIndexIssue]

    def predict(self, batch: Any) -> Any:
        return self.scorer(batch)

    def encode_response(self, output: float) -> dict[str, float]:
        return {"value": output}


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.004)
    api.reward = sys.argv[2]
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[1]), host="127.0.0.1", log_level="error", generate_client_file=False)
