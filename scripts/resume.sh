#!/usr/bin/env bash
# Starts or resumes a run. The program is `harness resume`; this script finds an interpreter that has it.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    cat <<'HELP'
usage: scripts/resume.sh [OPTION…] [-- COMMAND…]

Starts a training under the harness, or resumes it from its newest durable snapshot: the same line in a systemd unit, a
container's entrypoint, a Slurm or Kubernetes job, and on a laptop. The options, the exit codes and the actions that
follow them are those of `harness resume` (docs/operations.md):

    scripts/resume.sh --store s3://bucket/prefix --run gpt-small -- python train.py --lr 3e-4
    scripts/resume.sh --dry-run …           which snapshot would be used, which were rejected and why, and the command

Settings come from options, then from the environment (HARNESS_RUN, HARNESS_STORE, HARNESS_COMMAND, …), to which
/etc/harness/local.env and /etc/harness/node.env add, then from the tags of the instance.

    HARNESS_PYTHON   an interpreter with the harness; else that of HARNESS_VENV, of .venv in the clone, or python3.
                     The command's `python` is the same one
    HARNESS_ROOT     the folder that holds etc/harness (default: /)
HELP
    exit
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# load FILE — export those of its settings that the environment lacks.
load() {
    local entry
    [[ -r "$1" ]] || return 0
    # shellcheck disable=SC2016  # the inner shell's $1: the file is read where nothing else is set
    while IFS= read -r -d '' entry; do
        [[ -v "${entry%%=*}" ]] || export "${entry?}"
    done < <(env -i "$BASH" -c 'set -a; source "$1"; exec env -0' - "$1")
}

load "${HARNESS_ROOT:-}/etc/harness/local.env"  # of this machine, made here
load "${HARNESS_ROOT:-}/etc/harness/node.env"   # of the fleet

tried=""
for python in "${HARNESS_PYTHON:-}" "${HARNESS_VENV:+$HARNESS_VENV/bin/python}" "$here/../.venv/bin/python" python3; do
    if [[ -z "$python" ]] || ! command -v "$python" >/dev/null; then
        continue
    fi
    # -P: a folder of the program that is named harness is not ours.
    if said="$("$python" -P -c 'import harness.__main__' 2>&1)"; then
        [[ "$python" != */* ]] || export PATH="${python%/*}:$PATH"  # the command's `python` is the same one
        exec "$python" -P -m harness resume "$@"
    fi
    tried+="    $python: ${said##*$'\n'}"$'\n'
done

{
    printf '%s: no Python with the harness was found. Tried:\n%s' "${0##*/}" "${tried:-$'    nothing: there is no python3\n'}"
    printf 'Install it (Python 3.11 or newer): python3 -m pip install harness-spot; or name one: HARNESS_PYTHON=…/python\n'
} >&2
exit 64
