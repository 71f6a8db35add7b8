#!/usr/bin/env bash
# Online DPO of a LoRA on FLUX.1-Fill, four GPUs; accumulation makes the optimizer step that of eight. key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m retouch train \
  configs/flux_fill_dpo.yaml optimizer.gradient_accumulation=4 resume=auto "$@"
