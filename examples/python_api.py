# %% [markdown]
# # retouch from Python
#
# Trains a tiny FLUX.1-Fill to write text into images, on a CPU in minutes, and looks at the result. The cells open
# as a notebook in VS Code and in Jupyter (jupytext); `python examples/python_api.py [STEPS]` runs all of them.

# %%
import logging
import sys
from pathlib import Path

import retouch
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("retouch").setLevel(logging.INFO)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdecimal() else 40
CONFIG = "example:tiny/flux_fill_grpo"

# %% [markdown]
# ## Data
#
# Signs with one word each, as image, mask and text. The training words have no target image: the reward is what OCR
# reads, and it needs the text alone.

# %%
data = Path("runs/python-data")
if not data.exists():
    write_signs(data / "prompts", draw_words(256, "train", 1), (32, 64), 1, with_targets=False)
    write_signs(data / "held_out", draw_words(16, "held_out", 2), (32, 64), 2)

# %% [markdown]
# ## Train
#
# Any key of the run file can be overridden. OCR runs in this process (`url: None`) instead of on servers.

# %%
run = retouch.train(
    CONFIG,
    name="python",
    resume="auto",
    data={"path": data / "prompts"},
    warmup_data=None,
    algorithm={"warmup_steps": 0},
    training={"max_steps": STEPS},
    evaluation={"data": {"path": data / "held_out"}, "num_examples": 16},
    **{"rollout.group_size": 4, "optimizer.batch_size_per_device": 12, "rewards.ocr.url": None},
)
print(run)

# %% [markdown]
# ## Look at it
#
# Rewards of the rollouts by step, then held-out images under the base and the trained weights.

# %%
rewards = {record["step"]: record["combined_score"] for record in run.metrics if record["kind"] == "rollout"}
for step in list(rewards)[:: max(1, len(rewards) // 8)]:
    print(f"step {step:3}  mean reward {rewards[step]:.3f}")

# %%
result = run.evaluate(images=1)
for weights, measures in result["means"].items():
    print(f"{weights:10} OCR similarity {measures['ocr.ned']:.3f}")

# %% [markdown]
# ## Use it

# %%
source, mask = data / "held_out/test0_source.png", data / "held_out/test0_mask.png"
images = run.sample(source, mask, text="OPEN", count=2)
for number, image in enumerate(images):
    image.save(run.path / f"open-{number}.png")
print(run.export("safetensors", run.path / "exported"))
print(run.report())
