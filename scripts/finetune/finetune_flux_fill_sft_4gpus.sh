#!/usr/bin/env bash
# Supervised fine-tuning of all weights of FLUX.1-Fill with EMA, four GPUs, sharded by FSDP2.
# Data: DATA_JSON_PATH, a list of images, masks and prompts; or DATA_PATH, a self_bench folder or such a list.
# key=value may follow.
#
# 55.6 GiB a GPU for its share of weights, gradients, moments and EMA weights, by
# `retouch check configs/flux_fill_sft_full.yaml --memory --world-size 4`; activations come on top. That leaves 24.0 GiB
# of an 80 GB GPU (docs/scaling.md); ema=null evaluation.weights=raw takes 11.1 GiB less.
# Host memory: 44.3 GiB for each process, while it reads the network.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/../launch.sh"
run_file flux_fill sft full
launch accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m retouch train \
  "${run[@]}" resume=auto "$@"
