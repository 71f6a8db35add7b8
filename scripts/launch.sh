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
  [ -n "$dry_run" ] || exec "$@"
  printf '%q' "$1"
  shift
  [ $# -eq 0 ] || printf ' %q' "$@"
  echo
}
