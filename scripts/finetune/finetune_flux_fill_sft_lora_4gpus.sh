#!/usr/bin/env bash
# Supervised fine-tuning of a LoRA on FLUX.1-Fill, four GPUs.
# Data: DATA_JSON_PATH, a list of images, masks and prompts; or DATA_PATH, a self_bench folder or such a list.
# key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/../launch.sh"
run_file flux_fill sft
launch accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m retouch train \
  "${run[@]}" resume=auto "$@"
