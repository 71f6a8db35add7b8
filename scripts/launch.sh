# shellcheck shell=bash
# Sourced by the launchers: `launch COMMAND ...` becomes the command, or with --dry-run first, prints it.
# Relative paths start from the repository, where the launchers go.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# torch's launcher kills its processes so many seconds after SIGTERM; a step, which they finish first, may take minutes
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}"
dry_run=
if [ "${1-}" = --dry-run ]; then
  dry_run=1
  shift
fi

launch() {
  if [ -z "$dry_run" ]; then
    [ "$1" = accelerate ] || exec "$@" # retouch handles every signal itself
    supervise "$@"
  fi
  printf '%q' "$1"
  shift
  [ $# -eq 0 ] || printf ' %q' "$@"
  echo
}

# `supervise COMMAND ...` runs a launcher, and passes every signal on as SIGTERM, which launchers pass on to their
# processes; SIGUSR1 and SIGUSR2, which SLURM sends before the time limit (--signal=USR1@300), would end them.
supervise() {
  local child= code=0 heard=
  trap 'heard=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM HUP USR1 USR2
  (
    trap '' USR1 USR2 # without B:, SLURM sends them to the launcher as well
    exec "$@"
  ) &
  child=$!
  [ -z "$heard" ] || kill -TERM "$child" 2>/dev/null || true # heard before there was a child to pass it on to
  while true; do
    heard=
    code=0
    wait "$child" || code=$?
    [ -n "$heard" ] || exit "$code"
  done
}

# `run_file FAMILY ALGORITHM [full]` sets the array `run`: the run file that fits the data of the environment, and the
# overrides that it takes. DATA_JSON_PATH, or else DATA_PATH, may be a list of images, masks and prompts; DATA_PATH may
# be a self_bench folder. The file of SFT reads both: a list to train on, and a folder to evaluate on.
run_file() {
  local family=$1 algorithm=$2 full=${3:+_$3}
  local listed="configs/${family}_manifest_$algorithm$full.yaml"
  run=("configs/${family}_$algorithm$full.yaml")
  if is_manifest "${DATA_PATH-}"; then
    # shellcheck disable=SC2016 # the run file expands it
    run=("$listed" 'data.path=${DATA_PATH}')
  elif [ "$algorithm" = sft ] && [ -n "${DATA_PATH-}" ]; then
    # shellcheck disable=SC2016
    [ -n "${DATA_JSON_PATH-}" ] ||
      run+=('data={format: self_bench, path: "${DATA_PATH}", resolution: 512}' evaluation.data=null)
    return
  fi
  [ -z "${DATA_JSON_PATH-}" ] || run=("$listed")
}

is_manifest() { # by its name, or a folder in the layout of imagefolder
  case ${1,,} in *.json | *.jsonl | *.csv | *.tsv) return 0 ;; esac
  [ -n "$1" ] && [ ! -e "$1/self_bench.txt" ] && { [ -e "$1/metadata.jsonl" ] || [ -e "$1/metadata.csv" ]; }
}

# `adapter_file ALGORITHM` sets `run` for a style adapter of FLUX.1-Fill: Calligrapher's where CALLIGRAPHER_PATH names its
# file, a new one elsewhere. Data as above; the reference of an entry without reference_path is its own mask box.
adapter_file() {
  local kind=flux_fill_ip
  [ -z "${CALLIGRAPHER_PATH-}" ] || kind=flux_fill_calligrapher
  run=("configs/${kind}_$1.yaml")
  if [ -n "${DATA_JSON_PATH-}" ]; then
    # shellcheck disable=SC2016
    run+=(data.format=manifest 'data.path=${DATA_JSON_PATH}' data.reference=mask_box)
  elif is_manifest "${DATA_PATH-}"; then
    run+=(data.format=manifest data.reference=mask_box)
  fi
}

# `now_all_weights ALGORITHM ARGUMENT ...` starts the launcher of all weights of FLUX.1-Fill from a path that trained a
# LoRA in earlier versions. A job that is queued again must not leave its LoRA for a new run.
now_all_weights() {
  local folder=scripts/finetune name=finetune_flux_fill_$1 parent=runs former word
  run_file flux_fill "$1"
  shift
  for word in "$@"; do
    case $word in logging.dir=*) parent=${word#*=} ;; esac
  done
  former=$parent/$(basename "${run[0]}" .yaml)
  if [ -e "$former/checkpoints" ] && [ ! -e "${former}_full" ]; then
    echo "$former: a run of a LoRA, which this path no longer trains; to continue it, run" \
      "$folder/${name}_lora_4gpus.sh; to train all weights, run $folder/${name}_4gpus.sh" >&2
    exit 2
  fi
  echo "${name}_4gpus.sh: trains all weights now; for a LoRA run $folder/${name}_lora_4gpus.sh" >&2
  exec "$folder/${name}_4gpus.sh" ${dry_run:+--dry-run} "$@"
}
