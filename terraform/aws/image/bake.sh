#!/usr/bin/env bash
# On the instance that an image is made of: prepares what a node of this run would prepare at its boot, and leaves nothing
# that is of one machine. HARNESS_ROOT is put before every path, for tests.
set -euo pipefail

root="${HARNESS_ROOT:-}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bin="$root/opt/harness/bin"

mkdir -p "$bin" "$root/etc/harness"
for script in bootstrap-node.sh resume.sh stop-fleet.sh; do install -m 0755 "$here/$script" "$bin/$script"; done

# As user data writes them: these decide what is prepared, and have to be the same at the boot.
for name in HARNESS_RUN HARNESS_STORE HARNESS_SOURCE HARNESS_PACKAGE HARNESS_SETUP HARNESS_PYTHON AWS_REGION; do
    # shellcheck disable=SC2001,SC2016
    printf '%s="%s"\n' "$name" "$(sed 's/[\\"$`]/\\&/g' <<<"${!name:-}")"
done >"$root/etc/harness/node.env"
printf 'AWS_DEFAULT_REGION="%s"\n' "${AWS_REGION:-}" >>"$root/etc/harness/node.env"

"$bin/bootstrap-node.sh" source environment
rm -f "$root/etc/harness/node.env" "$root/etc/harness/local.env"
rm -rf "$root/var/log/harness" "$root/var/lib/harness"
