#!/usr/bin/env bash
# GRPO of a style adapter on FLUX.1-Fill, one GPU. key=value may follow.
#
#   CALLIGRAPHER_PATH  calligrapher.bin, to go on from it; without it a new adapter, after a supervised warm-up, which is too
#                      short for it to follow the reference (configs/flux_fill_ip_sft.yaml has what released ones took)
#   SIGLIP_PATH        image encoder, hub id or folder (default: google/siglip-so400m-patch14-384)
#   MODEL_PATH         FLUX.1-Fill, hub id or folder (default: black-forest-labs/FLUX.1-Fill-dev)
#   DATA_PATH          self_bench folder with every test{N}_ref.png; or DATA_JSON_PATH, a list; the reference of an
#                      entry without reference_path is the mask box of its own image
#
# Memory by `retouch check --memory`, activations on top: 80.1 GiB from calligrapher.bin, 73.2 GiB for a new adapter; on
# four GPUs with training.sharding=zero2, 57.6 GiB and 53.5 GiB each (docs/style-adapter.md has that command).
# The SigLIP of the style reward is 1.7 GB of it on each of these GPUs; rewards.style.device=cpu keeps it on the CPU,
# as an 80 GB card (79.6 GiB) needs.
# Result: RUN/checkpoints/step-*/weights/ip-adapter.safetensors and ip-adapter.bin, of the EMA weights in ema/.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
adapter_file grpo
launch retouch train "${run[@]}" resume=auto "$@"
