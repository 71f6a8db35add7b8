#!/usr/bin/env bash
# Supervised fine-tuning of a LoRA on SD1.5-inpainting, four GPUs. key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m retouch train \
  configs/sd_inpaint_sft.yaml resume=auto "$@"
