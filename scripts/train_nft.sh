#!/usr/bin/env bash
# DiffusionNFT on FLUX.1-Fill, one GPU. It trains a LoRA; where SIGLIP_PATH or
# CALLIGRAPHER_PATH is set, a style adapter, as train_ip_nft.sh does. key=value may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
run_file flux_fill nft
[ -z "${SIGLIP_PATH-}${CALLIGRAPHER_PATH-}" ] || adapter_file nft
launch retouch train "${run[@]}" resume=auto "$@"
