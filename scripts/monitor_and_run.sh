#!/usr/bin/env bash
# Wait until GPUS (1) devices use less than FREE_BELOW_MIB (1000) of memory, run a command on them, and run it again after
# each resumable stop (exit code 3), at most MAX_RESTARTS (10) times. CUDA_VISIBLE_DEVICES limits the devices; POLL_S (60)
# is the number of seconds between checks.
#
#   GPUS=4 scripts/monitor_and_run.sh scripts/finetune/finetune_flux_fill_grpo_4gpus.sh
set -eu
allowed=${CUDA_VISIBLE_DEVICES-}
export CUDA_DEVICE_ORDER=PCI_BUS_ID # nvidia-smi counts so
# the command may start processes whose own codes a launcher swallows; each adds a line here
RETOUCH_EXIT_CODES=$(mktemp)
export RETOUCH_EXIT_CODES
trap 'rm -f "$RETOUCH_EXIT_CODES"' EXIT
# the jobs and not a variable, which is set after the command has begun
trap 'trap "" INT TERM HUP USR1 USR2; for child in $(jobs -p); do kill -TERM "$child" 2>/dev/null || true; done; wait; exit 3' INT TERM HUP USR1 USR2
trap '' PIPE # a reader of these messages that ends must not end the command, or keep it from being run again

say() {
  echo "$1" >&2 || true
}

refuse() {
  echo "$1" >&2
  exit 2
}

free_gpus() { # indices of the first GPUS devices that are free, with commas; nothing if there are fewer
  nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits | awk -F', *' \
    -v wanted="${GPUS:-1}" -v below="${FREE_BELOW_MIB:-1000}" -v allowed=",$allowed," '
    $2 < below && (allowed == ",," || index(allowed, "," $1 ",")) && found < wanted {
      list = list (found++ ? "," : "") $1
    }
    END { if (found == wanted) print list }'
}

dry_run=
if [ "${1-}" = --dry-run ]; then
  dry_run=1
  shift
fi
[ $# -gt 0 ] || refuse "usage: scripts/monitor_and_run.sh [--dry-run] COMMAND ..."
[[ ${GPUS:-1} =~ ^[1-9][0-9]*$ ]] || refuse "GPUS: given '$GPUS'; set a number of devices"
[[ ! $allowed =~ [^[:space:]] || ",$allowed" =~ ^(,[[:space:]]*[0-9]+[[:space:]]*)+$ ]] ||
  refuse "CUDA_VISIBLE_DEVICES: given '$allowed'; set the indices that nvidia-smi shows, as 0,1, or leave it out"
allowed=${allowed//[[:space:]]/}

condition="${GPUS:-1} GPUs hold less than ${FREE_BELOW_MIB:-1000} MiB"
if [ -n "$dry_run" ]; then
  echo "# when $condition, and again after exit code 3:"
  printf '%q' "$1"
  shift
  [ $# -eq 0 ] || printf ' %q' "$@"
  echo
  exit 0
fi
command -v nvidia-smi >/dev/null || refuse "nvidia-smi is not on PATH: there is nothing to wait for"
devices=$(nvidia-smi --query-gpu=index --format=csv,noheader | awk -F', *' -v allowed=",$allowed," '
  allowed == ",," || index(allowed, "," $1 ",") { found++ }
  END { print found + 0 }')
[ "${GPUS:-1}" -le "$devices" ] ||
  refuse "GPUS: given ${GPUS:-1}, but there are $devices${allowed:+ among CUDA_VISIBLE_DEVICES=$allowed}; set fewer"

restarts=0
while true; do
  waiting=
  until devices=$(free_gpus) && [ -n "$devices" ]; do
    [ -n "$waiting" ] || say "waiting until $condition"
    waiting=1
    sleep "${POLL_S:-60}" & wait $!
  done
  say "starting on GPUs $devices: $*"
  : >"$RETOUCH_EXIT_CODES"
  CUDA_VISIBLE_DEVICES=$devices "$@" &
  code=0
  wait $! || code=$?
  if [ -s "$RETOUCH_EXIT_CODES" ] && ! grep -qvx 3 "$RETOUCH_EXIT_CODES"; then code=3; fi
  [ "$code" -eq 3 ] || exit "$code"
  restarts=$((restarts + 1))
  [ "$restarts" -le "${MAX_RESTARTS:-10}" ] || { say "stopped $restarts times; no more restarts"; exit 3; }
  say "stopped, resumable; restart $restarts"
done
