#!/usr/bin/env bash
# Reward servers: REWARDS (ocr), PORT (8000) and ENDPOINTS, the file that training reads. Options of
# `retouch reward serve` may follow.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
launch retouch reward serve "${REWARDS:-ocr}" --port "${PORT:-8000}" \
  --endpoints "${ENDPOINTS:-runs/endpoints.json}" "$@"
