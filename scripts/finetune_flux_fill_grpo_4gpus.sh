#!/usr/bin/env bash
# The same as scripts/finetune/finetune_flux_fill_grpo_4gpus.sh. In earlier versions it trained a LoRA, as
# scripts/finetune/finetune_flux_fill_grpo_lora_4gpus.sh does. Where there is such a run, it exits with 2.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
now_all_weights grpo "$@"
