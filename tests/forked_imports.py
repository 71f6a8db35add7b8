"""What the server of `tests.forked` imports: every module of the package that its extras allow, and the launchers."""

import contextlib
import gc
import importlib
import os
import pkgutil

from PIL import Image

import retouch

for found in pkgutil.walk_packages(retouch.__path__, "retouch."):
    if not found.name.endswith("__main__"):
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)
for name in ("torch.distributed.run", "torch.distributed.fsdp", "accelerate.commands.launch"):
    importlib.import_module(name)
Image.init()  # its formats are modules

os.fsync = lambda fd: None  # what is written need not outlive the machine
gc.freeze()  # what is imported lives as long as its forks: none of them looks through it for garbage
