#!/usr/bin/env bash
# GRPO of all weights of the text encoder of Qwen-Image-Edit, eight GPUs, ZeRO-3. key=value may follow.
# Needs the extras train, vlm and deepspeed, and OPENAI_API_KEY, or JUDGE_URL of another judge; the other variables are in the run file's header.
# The judge at OpenAI has a budget (rewards.*.budget_dollars of the run file); when it is spent, the run stops and can be resumed.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch accelerate launch --config_file configs/accelerate/zero3.yaml -m retouch train \
  configs/qwen_image_edit_vlm_grpo_full_8gpu.yaml resume=auto "$@"
