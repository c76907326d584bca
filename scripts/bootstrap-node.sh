#!/usr/bin/env bash
# Prepares an instance for its run: disks, source, environment, units. User data starts it at the first boot,
# harness-node.service at every boot: it keeps what is in order, and completes what was interrupted.
# It owns what it writes, and never a disk, an archive or an interpreter that others made. resume.sh starts, repeats and
# ends the run, stop-fleet.sh stops a fleet that cannot train.
set -euo pipefail
shopt -s inherit_errexit nullglob

root="${HARNESS_ROOT:-}"
disk_links="${HARNESS_DISK_LINKS:-/dev/disk/by-id}"
settings="$root/etc/harness/node.env"
local_env="$root/etc/harness/local.env"
mount_point="$root/mnt/harness"
sources="$root/opt/harness/source"
current="$sources/current"
work="$sources/.work" # guarded by .lock
venv="$root/opt/harness/venv"
logs="$root/var/log/harness"
label=harness # of our file system and our array
user=harness  # of the run
USAGE=64      # exit code: the user has to change something
FAULT=70      # another attempt may succeed
LIMIT_S=5400  # for all attempts together; TimeoutStartSec= is longer, to notify the owner

usage() {
    cat <<'HELP'
usage: bootstrap-node.sh [boot] [disks] [source] [environment] [units]

    boot          harness-node.service: this script, at each boot from now on
    disks         the instance store, as one file system, at /mnt/harness
    source        the run's code in /opt/harness/source/<digest>, and the link `current` to it; or to the archive's
                  single folder, if there is nothing else at its top
    environment   an interpreter with torch, the harness and the code's requirements; local.env gets its path.
                  environment/bin/python of the archive comes before the AMI's
    units         harness.service (resume.sh), which is started

Each can be repeated. Without arguments it makes all, in up to three attempts and 90 minutes; if that fails, it stops the
fleet (stop-fleet.sh), since an idle instance costs as much as one that trains. /etc/harness/node.env describes the run. Exit codes: 64, the user has to change what the message names; 70, anything else.

    HARNESS_ROOT         prefix of every path that is written; systemd is then not used
    HARNESS_DISK_LINKS   folder of the links that name disks (default: /dev/disk/by-id)
    HARNESS_GPU          the file that is there where there are GPUs (default: /dev/nvidia0)
HELP
}

say() { printf 'bootstrap-node: %s\n' "$*" >&2; }
warn() { say "WARNING: $*"; }
refuse() { say "$*"; exit "$USAGE"; }
fail() { say "$*"; exit "$FAULT"; }
have() { command -v "$1" >/dev/null; }
systemd_runs() { [[ -z "$root" && -d /run/systemd/system ]]; }

main() {
    [[ " $* " != *\ -h\ * && " $* " != *\ --help\ * ]] || { usage; exit; }
    [[ " $* " =~ ^\ +((boot|disks|source|environment|units)\ )*$ ]] || { usage >&2; exit "$USAGE"; }
    export HOME="${HOME:-/root}" PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    if (($#)); then prepare "$@"; return; fi
    mkdir -p "$logs" || warn "there is no log"
    prepare_all 2> >(exec tee -a "$logs/bootstrap.log" >&2)
}

prepare() {
    local part parts begun
    mkdir -p "$sources" "$logs"
    exec 9>"$sources/.lock"
    flock 9 # user data and harness-node.service may run at once
    rm -rf "$work"
    mkdir "$work"
    read_settings
    ! systemd_runs || warm_up 9>&- &
    parts="\"system\": $(uptime_s)"
    for part in "$@"; do
        begun="$(uptime_s)"
        "prepare_$part" </dev/null 1>&2
        parts+=", \"$part\": $(awk "BEGIN { print $(uptime_s) - $begun }")"
    done
}

# Reads the libraries of the image while code and packages are fetched: a volume of EBS fetches each block from its
# snapshot when it is first read, and the run's own import would wait for that.
warm_up() {
    [[ -z "${HARNESS_IMAGE:-}" ]] || return 0
    nice "${HARNESS_PYTHON:-/opt/pytorch/bin/python}" -c 'import torch' </dev/null >/dev/null 2>&1 || true
}

uptime_s() { cut -d ' ' -f 1 /proc/uptime; }

# Where the time of this boot went, for the run's journal: seconds since the kernel began, and those of each part. User
# data and harness-node.service both come here; the first of a boot has done the work.
note_boot() {
    local file="$root/etc/harness/boot.json" id
    id="$(</proc/sys/kernel/random/boot_id)"
    ! grep -qsF "$id" "$file" || return 0
    printf '{"boot_id": "%s", "booted_at": %d, "parts_s": {%s}}\n' "$id" \
        "$(awk '$1 == "btime" { print $2 }' /proc/stat)" "$parts" >"$file.new"
    mv "$file.new" "$file"
}

# An attempt is a process of its own: one that hangs, or finds no room for its lock, must not leave an instance idle.
prepare_all() {
    local attempt code
    for attempt in 1 2 3; do
        say "$(date -u +%FT%TZ) attempt $attempt"
        code=0
        timeout --kill-after=60 "$((LIMIT_S - SECONDS))" \
            "$BASH" "${BASH_SOURCE[0]}" boot disks source environment units || code=$?
        ((code != 0)) || return 0
        ((code != 124 && SECONDS < LIMIT_S)) || { say "given up after $((SECONDS / 60)) minutes: something hangs"; break; }
        ((code != USAGE && attempt < 3 && SECONDS + 60 < LIMIT_S)) || break # the sleep, and more
        sleep 30
    done
    # A newer template, of an apply since this boot began, may have the remedy: then only this instance goes.
    "$root/opt/harness/bin/stop-fleet.sh" --outdated "no instance can be prepared" "$logs/bootstrap.log" 9>&-
    exit "$code"
}

# Accepts what bash and systemd read alike, and nothing that bash would run.
read_settings() {
    local line number=0
    # shellcheck disable=SC2016
    local allowed='^([A-Za-z_][A-Za-z0-9_]*="([^"\\$`]|\\["\\$`])*"|#.*|)$'
    [[ -r "$settings" ]] || refuse "$settings is not there: user data writes it"
    while IFS= read -r line || [[ -n "$line" ]]; do
        ((++number))
        [[ "$line" =~ $allowed ]] || refuse "$settings, line $number: is not NAME=\"value\", with \\ before \\ \" \$ \`"
    done <"$settings"
    set -a
    # shellcheck source=/dev/null
    source "$settings"
    set +a
    [[ -n "${HARNESS_RUN:-}" ]] || refuse "run: HARNESS_RUN is missing in $settings"
}

# --------------------------------------------------------------------------------------------------------------- disks

prepare_disks() {
    local all usable=() disk device elsewhere holds
    ! mountpoint -q "$mount_point" || { say "$mount_point is mounted"; return; }
    mapfile -t all < <(instance_disks)
    elsewhere="$(mounted_elsewhere)"
    [[ -z "$elsewhere" ]] || { say "the AMI has mounted the instance store: used at $elsewhere"; return; }
    for disk in "${all[@]}"; do
        holds="$(signatures "$disk")" || { warn "$disk: wipefs cannot read it: left alone"; continue; }
        if [[ -z "$holds" ]] || has_our_file_system "$disk" || is_of_our_array "$disk"; then
            usable+=("$disk")
        else
            warn "$disk holds $holds, not ours: left alone. To use it: wipefs --all $disk"
        fi
    done
    if ((${#usable[@]} == 0)); then
        warn "NO INSTANCE STORE to use (${#all[@]} disks). Local snapshots go to the slow root volume" \
            "(125 MB/s for gp3 unless more is paid for), and end with the instance too. Choose types with NVMe."
        return
    fi
    device="$(one_device "${usable[@]}")"
    holds="$(signatures "$device")"
    [[ -z "$holds" ]] || try_mount "$device" ||
        warn "the file system of $device cannot be mounted ($(<"$work/error")): made again, its content is lost"
    mountpoint -q "$mount_point" || { make_file_system "$device" && try_mount "$device"; } ||
        fail "$device cannot be made a file system and mounted: $(cat "$work/error")"
    say "$mount_point is $device, $(property TYPE "$device")"
}

# By name and not by number: /dev/nvme1n1 may be an EBS volume. Disks and partitions have several links each.
instance_disks() {
    local link
    for link in "$disk_links"/*NVMe_Instance_Storage_*; do
        [[ "$link" == *-part[0-9]* ]] || realpath "$link"
    done | sort -u
}

# The Deep Learning AMIs have a service that stripes the disks with LVM, and mounts them at /opt/dlami/nvme.
mounted_elsewhere() {
    local disk
    for disk in $(instance_disks); do lsblk --noheadings --raw --output MOUNTPOINT "$disk"; done |
        grep '^/' | grep -vxF "$mount_point" | head -n 1 || true
}

signatures() { wipefs --noheadings --output TYPE "$1" | sort -u | paste -s -d ' '; }
property() { blkid -p -o value -s "$1" "$2" || true; }
has_our_file_system() { [[ "$(property USAGE "$1") $(property LABEL "$1")" == "filesystem $label" ]]; }
is_of_our_array() { have mdadm && mdadm --examine --export "$1" 2>&1 | grep -qE "^MD_NAME=(.*:)?$label$"; }

# one_device DISK… — the array of all of them, or the first.
one_device() {
    local disk
    for disk in "$@"; do
        has_our_file_system "$disk" || continue # from a boot at which no array could be made
        (($# == 1)) || warn "$disk was used alone before, and is again: the other disks lie idle"
        echo "$disk"
        return
    done
    if (($# > 1)); then
        if have mdadm && array_of "$@"; then return; fi
        warn "NO ARRAY of the $# disks: no mdadm here, or it failed. Only $1 is used, at a fraction of their speed"
    fi
    echo "$1"
}

# array_of DISK… — the RAID0 of exactly these: the running one, else assembled, else a new one.
array_of() {
    ! running_array "$@" || return 0
    stop_arrays "$@"
    if is_of_our_array "$1"; then
        mdadm --quiet --assemble --run "/dev/md/$label" "$@" >&2 || true
        ! running_array "$@" || return 0
        warn "the array of $* is not whole: made again, its content is lost"
        stop_arrays "$@"
    fi
    wipefs --quiet --all "$@" >&2
    mdadm --quiet --create "/dev/md/$label" --run --level=0 --name="$label" --raid-devices=$# "$@" >&2 || return 1
    mdadm --quiet --wait "/dev/md/$label" >&2 || true # 1: nothing to wait for
    running_array "$@"
}

# As the kernel reports it: a reboot changes its number, and may add the host's name to its own.
running_array() {
    local found
    found="$(arrays_above "$@")"
    [[ "$(wc -w <<<"$found")" == 1 && "$(wc -w <"/sys/block/$found/md/raid_disks")" == 1 ]] || return 1
    [[ "$(<"/sys/block/$found/md/raid_disks")" == "$#" && "$(blockdev --getsize64 "/dev/$found")" != 0 ]] || return 1
    echo "/dev/$found"
}

arrays_above() {
    local disk holder
    for disk in "$@"; do
        for holder in "/sys/class/block/${disk##*/}/holders/"md*; do echo "${holder##*/}"; done
    done | sort -u
}

stop_arrays() {
    local array
    for array in $(arrays_above "$@"); do mdadm --quiet --stop "/dev/$array" >&2 || true; done
}

# Without TRIM: instance store arrives trimmed, and terabytes take minutes.
make_file_system() {
    wipefs --quiet --all "$1" >&2
    if have mkfs.xfs && { grep -qw xfs /proc/filesystems || modprobe -q xfs; }; then
        mkfs.xfs -q -f -K -L "$label" -l su=8b "$1" 2>"$work/error"
    else
        mkfs.ext4 -q -F -E nodiscard -L "$label" "$1" 2>"$work/error"
    fi
}

# The unit is started here and never enabled: no boot waits for a disk that was another instance's.
try_mount() {
    mkdir -p "$mount_point"
    write_unit mnt-harness.mount <<UNIT
[Unit]
Description=Instance store
[Mount]
What=/dev/disk/by-uuid/$(property UUID "$1")
Where=/mnt/harness
Type=$(property TYPE "$1")
Options=noatime
UNIT
    if systemd_runs; then
        udevadm trigger --settle --action=change "$1" # else the link by UUID may be missing: udev looked before mkfs
        systemctl daemon-reload
        systemctl start mnt-harness.mount 2>"$work/error"
    else
        mount -t "$(property TYPE "$1")" -o noatime "$1" "$mount_point" 2>"$work/error"
    fi
}

# -------------------------------------------------------------------------------------------------------------- source

# Checked again at each boot, so that a new archive at the same address is used; but an unreachable store does not stop
# an instance that has the code.
prepare_source() {
    local kind mark="" digest="" address=""
    mkdir -p "$sources/none"
    read -r mark digest address 2>/dev/null <"$sources/.fetched" || true
    [[ "$address" == "${HARNESS_SOURCE:-}" && -d "$sources/${digest:-none}" ]] || mark="" digest=""
    case "${HARNESS_SOURCE:-}" in
        "") switch_to none; return ;;
        s3://?*/?*) kind=archive ;;
        git+https://?* | git+ssh://?* | git+file://?*) kind=git ;;
        *) refuse "source_archive: '$HARNESS_SOURCE' is neither s3://bucket/key nor git+https://host/repository@ref" ;;
    esac
    if ! "fetch_$kind" "$mark"; then
        [[ -n "$digest" ]] || exit "$(<"$work/code")"
        warn "source_archive: the earlier copy is used ($digest)"
    elif [[ "$(<"$work/mark")" != "$mark" ]]; then
        "unpack_$kind"
        [[ -d "$sources/$digest" ]] || { sync --file-system "$work/tree"; mv -T "$work/tree" "$sources/$digest"; }
        printf '%s %s %s\n' "$(<"$work/mark")" "$digest" "$HARNESS_SOURCE" >"$work/fetched"
        mv "$work/fetched" "$sources/.fetched"
    fi
    switch_to "$digest"
}

switch_to() {
    local target="$1" top # in `none`, folders are the program's own
    mapfile -t top < <(ls -A "$sources/$1")
    if [[ "$1" != none ]] && ((${#top[@]} == 1)) && [[ -d "$sources/$1/${top[0]}" ]]; then target="$1/${top[0]}"; fi
    ln -sfn "$target" "$work/current"
    mv -T "$work/current" "$current"
    say "source: $target"
}

fetch_archive() { fetch source_archive "$HARNESS_SOURCE" "$work/archive" "$1"; }

unpack_archive() {
    local python
    digest="$(sha256sum "$work/archive" | cut -c -16)"
    [[ ! -d "$sources/$digest" ]] || return 0
    python="$(python_that 'import tarfile; tarfile.data_filter')" ||
        refuse "python: none here unpacks safely (3.11.4 or newer): use another AMI, or name an interpreter"
    "$python" -c "$UNPACK" "$work/archive" "$work/tree" 2>"$work/error" ||
        refuse "source_archive: $HARNESS_SOURCE is refused: $(<"$work/error")"
}

# A branch goes on, and the run does not: the commit that the first node fetches is what all later ones get.
fetch_git() {
    local url="${HARNESS_SOURCE#git+}" ref=HEAD path key code=0
    have git || refuse "source_archive: this AMI has no git; give an archive on S3"
    path="${url#*://*/}"
    if [[ "$path" == *@* ]]; then ref="${path#*@}" url="${url%"@${path#*@}"}"; fi
    key="source.$(sha256sum <<<"$HARNESS_SOURCE" | cut -c -16).txt"
    git init --quiet "$work/tree"
    git -C "$work/tree" remote add origin "$url" # base of relative addresses of submodules
    if [[ "$ref" =~ ^[0-9a-f]{40}$ ]] || ! has_records; then
        get_commit
        return
    fi
    recall "$key" "$work/commit" || code=$?
    if ((code == 3)); then
        get_commit || return
        code=0
        keep "$key" "$work/mark" || code=$?
        ((code != 0)) || return 0
        ((code != 3)) || { code=0; recall "$key" "$work/commit" || code=$?; }
    fi
    ((code == 0)) || { echo "$FAULT" >"$work/code"; return 1; }
    ref="$(<"$work/commit")"
    get_commit || { say "source_archive: that is the commit which this run began with: $(record "$key")"; return 1; }
}

get_commit() {
    if ! GIT_TERMINAL_PROMPT=0 git -C "$work/tree" fetch --quiet --depth 1 -- "$url" "$ref" ||
        ! git -C "$work/tree" rev-parse --quiet --verify 'FETCH_HEAD^{commit}' >"$work/mark"; then
        say "source_archive: $url has no $ref, or cannot be reached or read from here"
        echo "$FAULT" >"$work/code"
        return 1
    fi
}

unpack_git() {
    digest="$(<"$work/mark")"
    git -C "$work/tree" checkout --quiet "$digest"
    git -C "$work/tree" submodule --quiet update --init --recursive --depth 1 ||
        fail "source_archive: a submodule cannot be fetched. Archives of scripts/pack hold them"
}

# fetch VARIABLE URL FILE MARK — get the object, unless its ETag is MARK; write its ETag to $work/mark. If it fails, say
# why, and write the exit code to $work/code.
fetch() {
    local variable="$1" bucket="${2#s3://}" key answer code="$USAGE" get
    key="${bucket#*/}"
    bucket="${bucket%%/*}"
    if get="$(python_that "$HAS_BOTO3")"; then
        get=("$get" -c "$GET_OBJECT")
    elif have aws; then
        get=(get_by_cli)
    else
        if ! python3 -m venv "$work/boto3" || ! "$work/boto3/bin/pip" install --quiet boto3; then
            say "$variable: $2 needs the AWS CLI or boto3, and boto3 cannot be installed: choose another AMI"
            echo "$FAULT" >"$work/code"
            return 1
        fi
        get=("$work/boto3/bin/python" -c "$GET_OBJECT")
    fi
    ! "${get[@]}" "$bucket" "$key" "$3" "$4" >"$work/mark" 2>"$work/error" || return 0
    answer="$(grep -m 1 'An error occurred' "$work/error" || tail -n 1 "$work/error")" # the CLI may add details
    case "$answer" in
        *"(304)"*) echo "$4" >"$work/mark"; return 0 ;;
        *NoSuchKey* | *NoSuchBucket* | *"(404)"*) say "$variable: $2 is not there ($answer)" ;;
        *AccessDenied* | *"(403)"*)
            say "$variable: the instance's role may not read $2: s3:GetObject is needed, kms:Decrypt if a key" \
                "encrypts it, and s3:ListBucket to be told that there is no such object ($answer)" ;;
        *) say "$variable: $2 cannot be fetched: $answer"; code="$FAULT" ;;
    esac
    echo "$code" >"$work/code"
    return 1
}

get_by_cli() {
    aws s3api get-object --bucket "$1" --key "$2" ${4:+--if-none-match "$4"} --query ETag --output text "$3"
}

# The first interpreter that can run a line. An earlier boot's environment has the harness's needs, boto3 too.
python_that() {
    local python
    for python in ${HARNESS_PYTHON:+"$HARNESS_PYTHON"} /opt/pytorch/bin/python python3 "$venv/bin/python"; do
        if "$python" -c "$1" 2>/dev/null; then echo "$python"; return; fi
    done
    return 1
}

HAS_BOTO3='import importlib.util; assert importlib.util.find_spec("boto3")'
read -r -d '' GET_OBJECT <<'PYTHON' || true
import shutil, sys, boto3
bucket, key, path, mark = sys.argv[1:]
try:
    found = boto3.client("s3").get_object(Bucket=bucket, Key=key, **({"IfNoneMatch": mark} if mark else {}))
    with open(path, "wb") as file:
        shutil.copyfileobj(found["Body"], file, 1 << 20)
except Exception as error:
    sys.exit(str(error))
print(found["ETag"])
PYTHON

# Refuses what leaves the target: absolute paths, "..", links out of it, devices.
read -r -d '' UNPACK <<'PYTHON' || true
import os, sys, tarfile, zipfile
archive, target = sys.argv[1:]
def check(name):
    if name.startswith("/") or ".." in name.split("/"):
        sys.exit(f"{name!r} is outside of it")
try:
    os.mkdir(target)
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for member in tar:
                check(member.name)
            tar.extractall(target, filter="data")
    else:
        with zipfile.ZipFile(archive) as files:
            for member in files.infolist():
                check(member.filename)
                if member.external_attr >> 28 == 0o12:
                    sys.exit(f"{member.filename!r} is a link: zip cannot hold it, .tar.gz can")
            for member in files.infolist():
                path = files.extract(member, target)
                if member.external_attr >> 16 & 0o100:
                    os.chmod(path, 0o755)  # zipfile itself makes nothing executable
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
PYTHON

# --------------------------------------------------------------------------------------------------------- environment

prepare_environment() {
    local python directory elsewhere
    if [[ -n "${HARNESS_IMAGE:-}" ]]; then prepare_image; else prepare_interpreter; fi
    elsewhere="$(mounted_elsewhere)"
    directory="${HARNESS_LOCAL:-${elsewhere:-$root/var/lib}/harness}"
    if [[ -z "${HARNESS_LOCAL:-}" ]] && mountpoint -q "$mount_point"; then directory="$mount_point/local"; fi
    mkdir -p "$directory"
    printf 'HARNESS_%s=%s\n' LOCAL "$(quoted "$directory")" PYTHON "$(quoted "$python")" BOOT '"/etc/harness/boot.json"' \
        >"$local_env.new"
    mv "$local_env.new" "$local_env"
    say "local snapshots in $directory, interpreter $python"
}

quoted() { sed 's/[\\"$`]/\\&/g; s/.*/"&"/' <<<"$1"; }

# Uses the base interpreter unchanged if nothing has to be added. Else makes an environment on top of it, which sees the
# AMI's torch, the one that fits its driver, and never replaces it. Sets `python`.
prepare_interpreter() {
    local base made_of package wheels=("$current"/{,wheels/}harness*.whl)
    base="$(base_interpreter)"
    python="$base"
    package="${HARNESS_PACKAGE:-${wheels[@]: -1}}"
    if [[ -z "$package${HARNESS_SETUP:-}" && ! -f "$current/requirements.txt" ]]; then
        has_harness "$base" || refuse_without_harness
        return
    fi
    python="$venv/bin/python"
    made_of="$(readlink -f "$current"; printf '%s\n' "$package" "${HARNESS_SETUP:-}" "$base"; "$base" -VV)"
    [[ ! -f "$venv/.made-of" || "$(<"$venv/.made-of")" != "$made_of" ]] || return 0
    make_environment "$base"
    fill_environment "$package"
    has_harness "$python" || refuse_without_harness
    printf '%s' "$made_of" >"$venv/.made-of" # last: a failed or interrupted one is made again
}

base_interpreter() {
    local name path
    for name in "${HARNESS_PYTHON:-$current/environment/bin/python}" /opt/pytorch/bin/python python3; do
        path="$(type -P "$name")" || { [[ "$name" != "${HARNESS_PYTHON:-}" ]] || break; continue; }
        "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            refuse "python: $path is $("$path" -V), and 3.11 or newer is needed: choose another AMI, name another" \
                "interpreter, or set container_image"
        echo "$path"
        return
    done
    refuse "python: there is no ${HARNESS_PYTHON:-python3} here: choose another AMI, or name another interpreter"
}

has_harness() { "$1" -P -c 'import harness.__main__' 2>"$work/error"; } # -P: as resume.sh does

refuse_without_harness() {
    refuse "harness_package: $python cannot import the harness ($(tail -n 1 "$work/error")). Put its wheel into the" \
        "archive, as scripts/pack does, or say what pip is to install"
}

# The base may be a virtual environment itself, as on the Deep Learning AMIs. --system-site-packages would then show the
# packages of the interpreter behind it, and not its torch: hence the .pth. pip is the base's, and installs here.
make_environment() {
    local packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    say "making $venv on $1"
    rm -rf "$venv"
    "$1" -m venv --without-pip --system-site-packages "$venv"
    printf 'import site; site.addsitedir(%s)\n' "'$("$1" -c "$packages")'" >"$("$python" -c "$packages")/base.pth"
    "$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip ||
        refuse "python: $1 has neither pip nor ensurepip: choose another AMI, or name another interpreter"
    printf '#!/bin/sh\nexec %s -m pip "$@"\n' "$(quoted "$python")" >"$venv/bin/pip"
    chmod +x "$venv/bin/pip"
    "$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >"$venv/constraints.txt" 2>/dev/null || true
}

fill_environment() {
    local package="$1" requirements=()
    local -x VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
    cd "$current"
    if [[ -f wheels/requirements.lock ]]; then
        install_vendored wheels/requirements.lock
    else
        if [[ "$package" == s3://* ]]; then
            package="$work/${1##*/}"
            fetch harness_package "$1" "$package" "" || exit "$(<"$work/code")"
        fi
        [[ "$package" != *.whl ]] || install_wheel "$package"
        [[ -n "${HARNESS_SETUP:-}" || ! -f requirements.txt ]] || requirements=(--requirement requirements.txt)
        install_resolved "$package" "${requirements[@]}"
    fi
    [[ -z "${HARNESS_SETUP:-}" ]] || set_up
    cd /
}

# The files that scripts/pack --vendor chose, by their sums: no index is asked.
install_vendored() {
    local made_for has
    made_for="$(sed -n 's/^# python //p' "$1")"
    has="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [[ "$made_for" == "$has" ]] || refuse "source_archive: its wheels are for Python $made_for, and here is $has:" \
        "scripts/pack --vendor --python $has"
    pip install --quiet --no-index --find-links wheels --no-deps --require-hashes --requirement "$1" ||
        refuse "source_archive: its wheels cannot be installed here: $1"
}

# install_resolved PACKAGE [--requirement FILE] — the first node of a run has pip resolve what is needed, and leaves what
# it found with the run, by version and sum. Every later one installs the same, whatever the index has by then.
install_resolved() {
    local package="$1" needs="$1" key code=0
    shift
    [[ -n "$package" || $# -gt 0 ]] || return 0
    if ! has_records; then resolve "$package" "$@"; return; fi
    [[ "$package" != *.whl ]] || needs="$("$python" -c "$WHEEL_NEEDS" "$package")"
    [[ ! -d "$package" ]] || needs+=" $(readlink "$current")"
    key="packages.$(environment_key "$needs").txt"
    recall "$key" "$work/resolved" || code=$?
    if ((code == 3)); then
        resolve "$package" "$@"
        code=0
        keep "$key" "$work/resolved" || code=$?
        ((code == 3)) || return "$code"
        code=0
        recall "$key" "$work/resolved" || code=$?
        say "packages: another node was quicker to resolve them; its choice is taken"
        make_environment "$base"
        [[ "$package" != *.whl ]] || install_wheel "$package"
    fi
    ((code == 0)) || exit "$FAULT"
    say "packages: as in $(record "$key")"
    # Not from the record, which would publish the password of an index: the same files are here, or there is no record.
    "$python" -P -c "$REQUIREMENTS" options "" "${@:2}" >"$work/options"
    install_recorded "$work/resolved" "$work/options" ||
        fail "packages: pip cannot install what an earlier node of this run had: $(record "$key"). To have them resolved" \
            "anew, delete that object"
}

# pip would skip a version that the base has already, whatever this wheel holds.
install_wheel() {
    pip install --quiet --force-reinstall --no-deps -- "$1" || fail "harness_package: pip cannot install $1"
}

# resolve PACKAGE [--requirement FILE] — as the index is now; $work/resolved gets the outcome.
resolve() {
    local package="$1"
    shift
    pip install --quiet --report "$work/report" --constraint "$venv/constraints.txt" "$@" -- ${package:+"$package"} ||
        fail "harness_package, requirements.txt: pip failed. torch stays as the AMI has it; to replace it, use setup_command"
    "$python" -c "$RESOLVED" "$work/report" "$(readlink -f "$current")" >"$work/resolved"
}

# install_recorded RECORD OPTIONS — from where the options say, as pip reads them in a requirements file.
install_recorded() {
    local also arguments
    ! grep -q '^[^#]' "$1" ||
        pip install --quiet --no-deps --require-hashes --requirement "$2" --requirement "$1" || return
    while IFS= read -r also; do # of a repository, or of the archive itself: pip knows no sums for them
        read -ra arguments <<<"$also"
        pip install --quiet --no-deps --requirement "$2" "${arguments[@]}" || return
    done < <(sed -n 's/^# also: //p' "$1")
}

# The same for what setup_command installs by pip: its versions become constraints of later nodes.
set_up() {
    local key="" known="" code=0
    if has_records; then
        key="setup.$(environment_key "$HARNESS_SETUP" "$(readlink "$current")").txt" # it may read any file of the code
        recall "$key" "$work/setup" || code=$?
        ((code == 0 || code == 3)) || exit "$FAULT"
        ((code == 3)) || known="$work/setup"
    fi
    [[ -z "$known" ]] || say "setup_command: pip is held to $(record "$key")"
    PIP_CONSTRAINT="${known:-${PIP_CONSTRAINT:-}}" bash -c "$HARNESS_SETUP" 9>&- ||
        fail "setup_command: ended with exit code $?: $HARNESS_SETUP"
    [[ -n "$key" && -z "$known" ]] || return 0
    "$python" -c "$VERSIONS" >"$work/setup"
    keep "$key" "$work/setup" || warn "setup_command: its versions are not recorded by this node"
}

# environment_key WORD… — a name for all that decides which packages fit: of another base, by other words, or for code
# with other requirements, they are resolved anew.
environment_key() {
    {
        "$base" -c "$BASE_HAS"
        printf '%s\0' "$@"
        [[ ! -f requirements.txt ]] || "$python" -P -c "$REQUIREMENTS" key "$(readlink "$current")" requirements.txt
    } | sha256sum | cut -c -16
}

BASE_HAS='
import importlib.metadata, platform, sys
print(sys.version, platform.machine(), *sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}))'
VERSIONS='
import importlib.metadata, sysconfig
found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
print(*sorted(f"{d.name}=={d.version}" for d in found if d.read_text("direct_url.json") is None), sep="\n")'
WHEEL_NEEDS='
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    print(*(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))'
# options CODE FILE — what a requirements file and those that it names say besides packages, with paths that hold in any
# folder. A variable stays one: pip puts its value in.
# key CODE FILE — what decides which packages they ask for: their text, and CODE if some come from a path.
read -r -d '' REQUIREMENTS <<'PYTHON' || true
import os, re, shlex, sys
wanted, code, *given = sys.argv[1:]
texts, options, has_paths = {}, [], False
def read(path):
    if path in texts or not os.path.isfile(path): # it may be an address
        return
    with open(path, "rb") as file:
        texts[path] = file.read()
    lines = texts[path].decode("utf-8-sig", "replace").splitlines()
    text = "\n".join(re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("-"):
            read_options(path, line)
        elif line:
            look_at(line)
def read_options(path, line):
    for name, value in pairs(line):
        beside = os.path.join(os.path.dirname(path), expanded(value))
        if name in ("-r", "--requirement", "-c", "--constraint"):
            read(beside)
        elif name in ("-e", "--editable"):
            look_at(f"./{value}" if os.path.exists(value) else value)
            return
        elif name in ("-f", "--find-links") and os.path.exists(beside):
            look_at("file:")
            options.append(f"{name} {shlex.quote(os.path.abspath(beside))}")
        elif name != "--require-hashes": # the record has the sums that pip knows
            options.append(f"{name} {shlex.quote(value)}" if value else name)
def pairs(line):
    try:
        words = shlex.split(line)
    except ValueError: # pip will say so
        words = line.split()
    found = []
    for word in words:
        if word.startswith("--"):
            found.append([*word.split("=", 1), ""][:2])
        elif word.startswith("-"):
            found.append([word[:2], word[2:]])
        elif found:
            found[-1][1] = word
    return found
def expanded(value):
    return re.sub(r"\$\{([A-Z0-9_]+)\}", lambda found: os.environ.get(found[1]) or found[0], value)
def look_at(requirement):
    global has_paths
    name = re.split(r"[\[;\s]", requirement)[0]
    is_path = "://" not in name and (name.startswith(".") or "/" in name or os.path.isfile(name))
    has_paths = has_paths or is_path or "file:" in requirement
for path in given:
    read(path)
if wanted == "options":
    print(*options, sep="\n")
else:
    sys.stdout.buffer.write(b"\0".join([*texts.values(), *([code.encode()] if has_paths else [])]))
PYTHON
read -r -d '' RESOLVED <<'PYTHON' || true
import json, os, sys, urllib.parse, urllib.request
report, current = sys.argv[1:]
lines, also = [], []
for item in json.load(open(report))["install"]:
    name, version, info = item["metadata"]["name"], item["metadata"]["version"], item["download_info"]
    if not item["is_direct"]:
        sums = info["archive_info"].get("hashes") or dict([info["archive_info"]["hash"].split("=", 1)])
        lines.append(f"{name}=={version} --hash=sha256:{sums['sha256']}")
    elif info["url"].startswith("file:"):
        path = urllib.request.url2pathname(urllib.parse.urlsplit(info["url"]).path)
        inside = os.path.relpath(os.path.realpath(path), current)
        also.append(("--editable " if info.get("dir_info", {}).get("editable") else "") + f"./{inside}")
    elif "vcs_info" in info:
        also.append(f"{info['vcs_info']['vcs']}+{info['url']}@{info['vcs_info']['commit_id']}")
    else:
        also.append(f"{info['url']}#sha256={info['archive_info']['hashes']['sha256']}")
print(*sorted(lines), *(f"# also: {line}" for line in also), sep="\n")
PYTHON

# ------------------------------------------------------------------------------------------------------------- records
# Small texts that the first node of a run leaves for all later ones, in the run's own folder of the store.

has_records() { [[ "${HARNESS_STORE:-}" == s3://?* ]]; }
record() { echo "${HARNESS_STORE%/}/$HARNESS_RUN/environment/$1"; }

# recall NAME FILE, keep NAME FILE — get the record, or write it. Return 3 if there is none, or if another node has written
# it; $FAULT, with the reason said, if the store does not answer.
recall() { in_records recall "$@"; }
keep() { in_records keep "$@"; }

in_records() {
    local code=0
    run_boto3 "$RECORDS" "$1" "$(record "$2")" "$3" 2>"$work/error" || code=$?
    ((code != 0 && code != 3)) || return "$code"
    say "$(record "$2"): cannot $1 it: $(tail -n 1 "$work/error")"
    return "$FAULT"
}

# A role that may not list the whole bucket is told 403 of an object that is not there: so its own folder is listed.
read -r -d '' RECORDS <<'PYTHON' || true
import os, sys, boto3
from botocore.exceptions import ClientError
action, address, path = sys.argv[1:]
bucket, _, key = address.removeprefix("s3://").partition("/")
s3, place = boto3.client("s3"), {"Bucket": bucket, "Key": key}
try:
    if action == "recall":
        found = s3.list_objects_v2(Bucket=bucket, Prefix=key).get("Contents", [])
        if all(one["Key"] != key for one in found):
            sys.exit(3)
        with open(path, "wb") as file:
            file.write(s3.get_object(**place)["Body"].read())
    else:
        how = {"ServerSideEncryption": "HARNESS_S3_SSE", "SSEKMSKeyId": "HARNESS_S3_KMS_KEY_ID"}
        place |= {name: os.environ[given] for name, given in how.items() if os.environ.get(given)}
        with open(path, "rb") as file:
            s3.put_object(**place, Body=file.read(), IfNoneMatch="*")
except ClientError as error:
    if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
        sys.exit(3)
    sys.exit(str(error))
except Exception as error:
    sys.exit(str(error))
PYTHON

# run_boto3 CODE ARGUMENT… — by an interpreter that has boto3, or by one of our own.
run_boto3() {
    local python
    if ! python="$(python_that "$HAS_BOTO3")"; then
        python="$work/boto3/bin/python"
        [[ -x "$python" ]] || { python3 -m venv "$work/boto3" && "$work/boto3/bin/pip" install --quiet boto3; } || return
    fi
    "$python" -c "$@"
}

# --------------------------------------------------------------------------------------------------------------- image

# The image is the environment. Sets `python` to an interpreter of the image.
prepare_image() {
    local image="$HARNESS_IMAGE"
    # shellcheck disable=SC2016
    local probe='for p in "$0" python3 python; do "$p" -P -c "import harness.__main__" && echo "$p" && exit; done; exit 1'
    have docker || refuse "container_image: this AMI has no docker"
    [[ "$image" =~ ^[A-Za-z0-9][A-Za-z0-9._:/@-]*$ ]] || refuse "container_image: '$image' names no image"
    [[ -z "${HARNESS_SETUP:-}${HARNESS_PACKAGE:-}" ]] || refuse "container_image: the image is the environment;" \
        "build it with what setup_command and harness_package would add"
    if [[ "$image" =~ ^[0-9]+\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com ]]; then
        aws ecr get-login-password --region "${BASH_REMATCH[1]}" |
            docker login --username AWS --password-stdin "${image%%/*}" || warn "container_image: no login at ECR"
    fi
    docker pull --quiet "$image" || docker image inspect "$image" >/dev/null ||
        fail "container_image: cannot pull $image"
    local gpus
    find_gpus
    # bash: resume.sh is run in there
    # With the GPUs that the run will use: "could not select device driver" ends the container before any program runs.
    python="$(docker run --rm "${gpus[@]}" --entrypoint bash --volume "$sources:$sources" --workdir "$current" "$image" \
        -c "$probe" "${HARNESS_PYTHON:-python}" 2>"$work/error")" ||
        refuse "container_image: $image does not start here, no python in it imports the harness, or there is no bash:" \
            "$(tail -n 1 "$work/error")"
}

# Sets `gpus`: docker's flags for the GPUs of this machine, if it has any.
find_gpus() {
    gpus=()
    [[ ! -e "${HARNESS_GPU:-/dev/nvidia0}" ]] || gpus=(--gpus all)
}

# --------------------------------------------------------------------------------------------------------------- units

# Units name the paths of the machine that runs them, without HARNESS_ROOT.
# Made first: otherwise a reboot during the first boot would end all preparation, since user data runs once.
prepare_boot() {
    write_unit harness-node.service <<'UNIT'
[Unit]
Description=What the harness's run needs of this instance
Wants=network-online.target
After=network-online.target docker.service dlami-nvme.service nvidia-persistenced.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/opt/harness/bin/bootstrap-node.sh
TimeoutStartSec=2h
[Install]
WantedBy=multi-user.target
UNIT
    ! systemd_runs || { systemctl daemon-reload; systemctl --quiet enable harness-node.service; }
}

prepare_units() {
    local start=/opt/harness/bin/resume.sh cleanup="" as="User=$user"
    [[ -x "$root$start" ]] || refuse "$root$start is not there: user data writes it"
    [[ -r "$local_env" ]] || refuse "$local_env is not there: prepare the environment first"
    if [[ -n "${HARNESS_IMAGE:-}" ]]; then
        cleanup="-$(type -P docker) rm --force harness"
        start="$(container_command "$start")"
        # docker's client needs root. In the container the image says who runs, and leaves the decision.
        as="RuntimeDirectoryMode=0777"
    fi
    note_boot
    give_to_user
    write_command
    # 180 s: a spot instance's 120, and time to report it. Every exit code of resume.sh is final, the program's own too:
    # systemd starts it again only if it died. The list keeps that true if Restart= is changed.
    write_unit harness.service <<UNIT
[Unit]
Description=The harness's run
Requires=harness-node.service
After=harness-node.service network-online.target docker.service mnt-harness.mount
StartLimitIntervalSec=1h
StartLimitBurst=5
OnFailure=harness-ended.service
OnSuccess=harness-ended.service
[Service]
$as
Environment=HARNESS_DECISION=/run/harness/decision
RuntimeDirectory=harness
RuntimeDirectoryPreserve=yes
EnvironmentFile=/etc/harness/node.env
EnvironmentFile=/etc/harness/local.env
WorkingDirectory=/opt/harness/source/current
ExecStartPre=$cleanup
ExecStartPre=-rm -f /run/harness/decision
ExecStart=$start
ExecStopPost=$cleanup
KillMode=mixed
TimeoutStopSec=180
OOMPolicy=continue
Restart=on-abnormal
RestartSec=10
RestartPreventExitStatus=0 64 70 73 74 75 130
LimitNOFILE=1048576
LimitMEMLOCK=infinity
StandardOutput=append:/var/log/harness/harness.log
StandardError=inherit
[Install]
WantedBy=multi-user.target
UNIT
    # A supervisor that was killed five times, a container that never started, a stop that did not reach AWS: whatever has
    # ended without a decision of `harness resume` leaves an instance that costs money and does nothing.
    write_unit harness-ended.service <<'UNIT'
[Unit]
Description=Stops the fleet, unless the harness's run has ended by a decision
StartLimitIntervalSec=0
[Service]
Type=oneshot
ExecStart=/opt/harness/bin/stop-fleet.sh --unless-decided
StandardOutput=append:/var/log/harness/harness.log
StandardError=inherit
UNIT
    keep_logs
    if systemd_runs; then
        systemctl daemon-reload
        systemctl --quiet enable harness.service
        systemctl start --no-block harness.service # it waits for harness-node.service, and that for our lock
    fi
}

# The program runs as a user of its own, who owns its folder and the local snapshots: instance store that an earlier boot
# has left, too.
give_to_user() {
    local directory
    [[ -z "${HARNESS_IMAGE:-}" ]] && systemd_runs || return 0
    id -u "$user" >/dev/null 2>&1 || useradd --system --create-home --shell /bin/bash "$user"
    # shellcheck source=/dev/null
    directory="$(source "$local_env"; echo "$HARNESS_LOCAL")"
    chown -R --no-dereference "$user:" "$(readlink -f "$current")" "$directory"
}

# `harness status` in a shell on the node looks at its run, as the run's user: with its settings, and its sockets.
write_command() {
    local command="$root/usr/local/bin/harness" as=""
    [[ -n "${HARNESS_IMAGE:-}" ]] || as="[[ \$EUID != 0 ]] || as=(runuser -u $user --)"
    [[ -z "${HARNESS_IMAGE:-}" ]] || as="as=(docker exec --interactive harness)"
    mkdir -p "${command%/*}"
    cat >"$command.new" <<COMMAND
#!/usr/bin/env bash
# The harness of this node, with the settings of its run. Written by bootstrap-node.sh.
set -a
source /etc/harness/node.env
source /etc/harness/local.env # last, as in harness.service: in node.env, HARNESS_PYTHON is empty or the base's
as=()
$as
exec "\${as[@]}" "\$HARNESS_PYTHON" -P -m harness "\$@"
COMMAND
    chmod 0755 "$command.new"
    mv "$command.new" "$command"
}

write_unit() {
    local unit="$root/etc/systemd/system/$1"
    mkdir -p "${unit%/*}"
    cat >"$unit.new"
    mv "$unit.new" "$unit"
}

# Values pass by name: docker takes them from the environment that systemd has made.
container_command() {
    local gpus names flags=(--rm --init --name harness --entrypoint "$1" --workdir /opt/harness/source/current --network host
        --ipc host --stop-timeout 180 --ulimit memlock=-1 --ulimit nofile=1048576 --volume /etc/harness:/etc/harness:ro
        --volume /opt/harness:/opt/harness --volume /run/harness:/run/harness --env HARNESS_DECISION)
    # shellcheck source=/dev/null
    source "$local_env"
    flags+=(--volume "$HARNESS_LOCAL:$HARNESS_LOCAL")
    find_gpus
    flags+=("${gpus[@]}")
    mapfile -t names < <(grep -hoE '^[A-Za-z0-9_]+' "$settings" "$local_env" | sort -u)
    echo "$(type -P docker) run ${flags[*]} ${names[*]/#/--env } $HARNESS_IMAGE"
}

# Rotated by copying, since systemd keeps the file open; and shipped if the AMI has an agent for that.
keep_logs() {
    local agent="$root/opt/aws/amazon-cloudwatch-agent" file list
    mkdir -p "$root/etc/logrotate.d"
    printf '%s\n' '/var/log/harness/*.log {' daily 'maxsize 200M' 'rotate 5' compress copytruncate missingok \
        notifempty '}' >"$root/etc/logrotate.d/harness"
    file="$agent/etc/harness.json"
    list="{\"file_path\": \"/var/log/harness/*.log\", \"publish_multi_logs\": true,
        \"log_group_name\": \"${HARNESS_LOG_GROUP:-}\", \"log_stream_name\": \"{instance_id}\"}"
    if [[ -z "${HARNESS_LOG_GROUP:-}" || ! -x "$agent/bin/amazon-cloudwatch-agent-ctl" ]]; then
        say "logs stay in $logs: HARNESS_LOG_GROUP is empty, or the AMI has no CloudWatch agent"
        return
    fi
    mkdir -p "${file%/*}"
    printf '{"logs": {"logs_collected": {"files": {"collect_list": [%s]}}}}\n' "$list" >"$file"
    "$agent/bin/amazon-cloudwatch-agent-ctl" -a append-config -m ec2 -s -c "file:$file" 9>&- ||
        warn "the CloudWatch agent refuses $file: logs stay in $logs"
}

main "$@"
