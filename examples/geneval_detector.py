"""Serve GenEval's published detector to the reward `geneval`, from the environment of GenEval itself.

    python geneval_detector.py --config mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py --weights WEIGHTS.pth

Run it in the environment that GenEval's README installs (Python 3.9, mmdet 2.x, open_clip): this file imports nothing
of retouch. Then set `detector_url: http://HOST:18100` for the reward. It listens on loopback unless --host is given;
put it behind a proxy with a password on other networks.

    POST /detect  {"image": PNG in base64, "threshold": 0.3, "most": 16, "colors": {class: number of objects}}
    reply         {"detector": name, "objects": [{"class", "score", "box": [left, top, right, bottom], "color"?}]}
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
TEMPLATES = ["a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object"]
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}


class Detector:
    """Mask2Former of mmdet 2.x for objects, CLIP ViT-L/14 of OpenAI for their colours."""

    def __init__(self, config: str, weights: str, device: str) -> None:
        self.apis = importlib.import_module("mmdet.apis")
        self.torch = importlib.import_module("torch")
        open_clip = importlib.import_module("open_clip")
        self.name = Path(weights).name
        self.device = device
        self.model = self.apis.init_detector(config, weights, device=device)
        self.classes: list[str] = [RENAMED.get(name, name) for name in map(str, self.model.CLASSES)]
        self.clip, _, self.pixels = open_clip.create_model_and_transforms(
            "ViT-L-14", pretrained="openai", device=device
        )
        self.clip.eval()
        self.tokens = open_clip.get_tokenizer("ViT-L-14")
        self.of_colors: dict[str, Any] = {}

    def __call__(self, image: Image.Image, threshold: float, most: int, colors: dict[str, int]) -> list[dict[str, Any]]:
        """The objects of each class above the threshold, best first; the first ones of a class have a colour."""
        boxes, masks = self.apis.inference_detector(self.model, np.asarray(image)[..., ::-1])  # as a file is read: BGR
        found: list[dict[str, Any]] = []
        for name, of_class, masks_of_class in zip(self.classes, boxes, masks):
            order = [i for i in np.argsort(of_class[:, 4])[::-1] if of_class[i, 4] > threshold][:most]
            for rank, i in enumerate(order):
                box = [float(side) for side in of_class[i, :4]]
                one: dict[str, Any] = {"class": name, "score": float(of_class[i, 4]), "box": box}
                if rank < colors.get(name, 0):
                    one["color"] = self.color(image, box, np.asarray(masks_of_class[i]), name)
                found.append(one)
        return found

    def color(self, image: Image.Image, box: list[float], mask: Any, name: str) -> str:
        """The colour of an object, cut out by its mask and cropped to its box."""
        blank = Image.new("RGB", image.size, "#999")
        left, top, right, bottom = (round(side) for side in box)
        crop = Image.composite(image, blank, Image.fromarray(mask)).crop((left, top, right, bottom))
        with self.torch.no_grad():
            seen = self.clip.encode_image(self.pixels(crop)[None].to(self.device))
            return COLORS[int((seen @ self.classifier(name).T).argmax())]

    def classifier(self, name: str) -> Any:
        """[10, D]: of each colour, the normalised mean of the normalised embeddings of its texts."""
        if name not in self.of_colors:
            rows = []
            for color in COLORS:
                texts = self.tokens([template.format(color=color, name=name) for template in TEMPLATES])
                rows.append(_unit(_unit(self.clip.encode_text(texts.to(self.device))).mean(0)))
            self.of_colors[name] = self.torch.stack(rows)
        return self.of_colors[name]


def _unit(rows: Any) -> Any:
    return rows / rows.norm(dim=-1, keepdim=True)


def server(detect: Callable[..., list[dict[str, Any]]], name: str, host: str, port: int) -> ThreadingHTTPServer:
    """A server that answers one request at a time; `serve_forever` starts it."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/detect":
                self.answer(404, {"error": "no such path"})
                return
            try:
                asked = json.loads(body)
                with Image.open(io.BytesIO(base64.b64decode(asked["image"]))) as opened:
                    image = opened.convert("RGB")
                given = float(asked["threshold"]), int(asked["most"]), dict(asked["colors"])
            except (ValueError, KeyError, TypeError, OSError) as error:
                self.answer(400, {"error": f"{type(error).__name__}: {error}"})
                return
            try:
                with lock:
                    objects = detect(image, *given)
            except Exception as error:
                self.answer(500, {"error": f"{type(error).__name__}: {error}"})
                return
            self.answer(200, {"detector": name, "objects": objects})

        def log_message(self, format: str, *values: object) -> None:
            """No line for each request: a terminal that is gone would fail them all."""

        def answer(self, status: int, reply: dict[str, Any]) -> None:
            payload = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve GenEval's detector to the reward geneval.")
    parser.add_argument("--config", required=True, help="config of Mask2Former in mmdet's repository")
    parser.add_argument("--weights", required=True, help="checkpoint of Mask2Former")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=18100)
    given = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:  # torch reads it when it is imported: threads sleep while they wait
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=os.environ.get("GOMP_SPINCOUNT", "15000"))
    detector = Detector(given.config, given.weights, given.device)
    print(f"{detector.name} at http://{given.host}:{given.port}")
    server(detector, detector.name, given.host, given.port).serve_forever()


if __name__ == "__main__":
    main()
