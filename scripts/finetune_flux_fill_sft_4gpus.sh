#!/usr/bin/env bash
# The same as scripts/finetune/finetune_flux_fill_sft_4gpus.sh.
set -eu
exec "$(dirname "$0")/finetune/finetune_flux_fill_sft_4gpus.sh" "$@"
