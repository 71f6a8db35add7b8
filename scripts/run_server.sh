#!/usr/bin/env bash
# Reward servers: REWARDS (ocr), PORT (8000) of the first, DEVICES (cpu; numbers of GPUs like 0,1: one server on each),
# REPLICAS on each device, and ENDPOINTS, the file that training reads. Options of `retouch reward serve` may follow.
# REPLICAS is 1, or with RUN_FILE, the run file of a run on GPUS (8) devices of kind GPU (h200), the number that this run
# would not wait for (`retouch check`), at most one for each core, of ocr each
# with one thread.
set -eu
# shellcheck source=scripts/launch.sh
. "$(dirname "$0")/launch.sh"
if [ -z "${REPLICAS-}${DEVICES-}" ] && [ -n "${RUN_FILE-}" ]; then
  checked=$(retouch check "$RUN_FILE" --world-size "${GPUS:-8}" --gpu "${GPU:-h200}" --json)
  REPLICAS=$(sed -n 's/^    "replicas": \([0-9]*\).*/\1/p' <<<"$checked")
  cores=$(nproc)
  [ "$REPLICAS" -le "$cores" ] || REPLICAS=$cores
  # by default every instance of ocr would use all cores
  case ",${REWARDS:-ocr}, $*" in *--options*) ;; *,ocr,*) set -- --options '{"ocr": {"threads": 1}}' "$@" ;; esac
fi
launch retouch reward serve "${REWARDS:-ocr}" --port "${PORT:-8000}" \
  ${DEVICES:+--devices "$DEVICES"} ${REPLICAS:+--replicas "$REPLICAS"} \
  --endpoints "${ENDPOINTS:-runs/endpoints.json}" "$@"
