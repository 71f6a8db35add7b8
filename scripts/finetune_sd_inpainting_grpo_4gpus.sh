#!/usr/bin/env bash
# GRPO of a LoRA on SD1.5-inpainting, four GPUs; accumulation makes the optimizer step that of eight. key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m retouch train \
  configs/sd_inpaint_grpo.yaml optimizer.gradient_accumulation=8 resume=auto "$@"
