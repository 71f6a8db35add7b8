#!/usr/bin/env bash
# DiffusionNFT of a LoRA on FLUX.1-Fill, one GPU: the published run with its images a step accumulated. key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch retouch train configs/flux_fill_nft.yaml optimizer.gradient_accumulation=64 resume=auto "$@"
