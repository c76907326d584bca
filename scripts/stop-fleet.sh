#!/usr/bin/env bash
# Stops the fleet from inside: for a node that cannot train, or whose supervisor has ended without a decision. Tells the
# owner why, sets the group to zero, lets go of the lifecycle hooks, and powers the machine off, whatever else fails.
set -uo pipefail # not -e: each step is tried, whatever became of the one before

root="${HARNESS_ROOT:-}"
limit_s="${HARNESS_STOP_S:-900}"      # for the call that sets the group to zero
pause_s="${HARNESS_STOP_PAUSE_S:-15}" # between two calls
let_go_s="${HARNESS_LET_GO_S:-90}"    # the group takes a while until it waits for the hook

usage() {
    cat <<'HELP'
usage: stop-fleet.sh [--outdated] SUBJECT [LOG]
       stop-fleet.sh --unless-decided

    SUBJECT            why, in a line; the owner gets it with the last lines of the file LOG
    --outdated         if the group uses a newer launch template than this node: have only this node replaced
    --unless-decided   harness-ended.service: does nothing if `harness resume` has left its decision in
                       /run/harness/decision

The group is HARNESS_GROUP, the topic HARNESS_TOPIC, the hooks HARNESS_HOOK and HARNESS_LAUNCH_HOOK, of
/etc/harness/node.env. Without a group, nothing is done. Calls are repeated for 15 minutes.

    HARNESS_ROOT       prefix of every path; nothing is powered off then
HELP
}

say() { printf 'stop-fleet: %s\n' "$*" >&2; }

main() {
    local outdated="" subject log decision="$root/run/harness/decision"
    [[ "${1:-}" != --outdated ]] || { outdated=1; shift; }
    subject="${1:-}" log="${2:-}"
    case "$subject" in
        "" | -h | --help) usage; exit ;;
        --unless-decided)
            [[ ! -s "$decision" ]] || { say "$(<"$decision")"; exit; }
            ! starts_again || { say "harness.service starts again"; exit; }
            subject="the supervisor has ended without a decision" log="$root/var/log/harness/harness.log"
            ;;
    esac
    load "$root/etc/harness/local.env"
    load "$root/etc/harness/node.env"
    say "$subject"
    [[ -n "${HARNESS_GROUP:-}" ]] || { say "there is no group to stop"; exit; }
    exec 8>"${root:-/run}/stop-fleet.lock"
    flock 8 # harness-node.service and harness-ended.service may come to this at once
    instance="$(instance_id)" || say "WARNING: the metadata service does not say which instance this is"
    find_client
    if [[ -n "$outdated" ]] && call is_outdated; then
        say "the group uses a newer launch template: this instance is replaced"
        repeat call leave
    else
        stop "$subject" "$(end_of "$log")"
    fi
    let_go
    power_off
}

# By hand, or by Restart= after a signal: newer systemd calls OnFailure= then, too.
starts_again() {
    [[ -z "$root" && "$(systemctl is-active harness.service)" =~ ^(active|activating|reloading)$ ]]
}

stop() {
    local text told=""
    text="$(printf '%s. The fleet is being stopped.\n\nAuto Scaling group %s, instance %s. The last lines of its log:\n\n%s' \
        "$1" "$HARNESS_GROUP" "${instance:-unknown}" "$2")"
    ! tell "$1" "$text" || told=1 # before the group ends this instance
    if repeat call zero; then
        say "the desired capacity of $HARNESS_GROUP is 0 now"
    else
        say "WARNING: $HARNESS_GROUP could not be set to zero, and may start another instance"
        told="" text="$text"$'\n\n'"THE GROUP COULD NOT BE SET TO ZERO: it may start other instances, which cost money."
    fi
    [[ -n "$told" ]] || tell "$1" "$text" || say "WARNING: cannot notify the owner"
}

# tell SUBJECT TEXT — SNS takes 99 printable ASCII characters, and no empty text
tell() {
    local subject
    [[ -n "${HARNESS_TOPIC:-}" ]] || return 0
    subject="$(tr -cd '\40-\176' <<<"${HARNESS_RUN:-run}: $1")"
    call notify "${subject::99}" "$2"
}

# The limits of SNS and of a command line: a progress bar can be a line of megabytes.
end_of() {
    [[ -r "$1" ]] || { echo "there is no log"; return; }
    tail -n 15 "$1" | tail -c 4000 | tr -cd '\11\12\40-\176'
}

# repeat COMMAND… — until it succeeds, or the time is over
repeat() {
    local until=$((SECONDS + limit_s))
    until "$@"; do
        ((SECONDS < until)) || return 1
        sleep "$pause_s"
    done
}

# An instance that is still being launched is given up; one that is being ended need not be waited for.
let_go() {
    local until=$((SECONDS + let_go_s))
    [[ -n "$instance" ]] || return 0
    [[ -z "${HARNESS_LAUNCH_HOOK:-}" ]] || call complete "$HARNESS_LAUNCH_HOOK" ABANDON || true
    [[ -n "${HARNESS_HOOK:-}" ]] || return 0
    until call complete "$HARNESS_HOOK" CONTINUE; do
        ((SECONDS < until)) || return 0
        sleep 3
    done
}

# The launch template has a shutdown end the instance: it costs nothing from then on, whatever the group does.
power_off() {
    [[ -z "$root" ]] || { say "not powered off: HARNESS_ROOT is set"; return; }
    sync
    systemctl poweroff || poweroff -f
}

# load FILE — export those of its settings that the environment lacks
load() {
    local entry
    [[ -r "$1" ]] || return 0
    # shellcheck disable=SC2016  # the inner shell's $1: the file is read where nothing else is set
    while IFS= read -r -d '' entry; do
        [[ -v "${entry%%=*}" ]] || export "${entry?}"
    done < <(env -i "$BASH" -c 'set -a; source "$1"; exec env -0' - "$1")
}

instance_id() {
    local token metadata="${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}"
    token="$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$metadata/latest/api/token")" &&
        curl -sf -m 5 -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/meta-data/instance-id"
}

# An interpreter that has boto3, or else the command line client.
find_client() {
    local python
    client=(by_cli)
    for python in "${HARNESS_PYTHON:-python3}" /opt/pytorch/bin/python python3 "$root/opt/harness/venv/bin/python"; do
        if "$python" -c 'import importlib.util; assert importlib.util.find_spec("boto3")' 2>/dev/null; then
            client=("$python" -c "$CALLS" "$HARNESS_GROUP" "$instance")
            return
        fi
    done
}

call() { "${client[@]}" "$@" 2> >(tail -n 1 | sed "s/^/stop-fleet: $1: /" >&2); }

read -r -d '' CALLS <<'PYTHON' || true
import os, sys, boto3
group, instance, call, *words = sys.argv[1:]
scaling = boto3.client("autoscaling")
if call == "notify":
    boto3.client("sns").publish(TopicArn=os.environ["HARNESS_TOPIC"], Subject=words[0], Message=words[1])
elif call == "zero":
    try:
        scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0, HonorCooldown=False)
    except scaling.exceptions.ClientError:
        scaling.update_auto_scaling_group(AutoScalingGroupName=group, MinSize=0, DesiredCapacity=0)
elif call == "leave":
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=instance, ShouldDecrementDesiredCapacity=False)
elif call == "complete":
    scaling.complete_lifecycle_action(
        AutoScalingGroupName=group, InstanceId=instance, LifecycleHookName=words[0], LifecycleActionResult=words[1]
    )
elif call == "is_outdated":
    (found,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])["AutoScalingGroups"]
    (ours,) = (each["LaunchTemplate"] for each in found["Instances"] if each["InstanceId"] == instance)
    used = found["MixedInstancesPolicy"]["LaunchTemplate"]["LaunchTemplateSpecification"]
    sys.exit(ours["Version"] == used["Version"])
PYTHON

by_cli() {
    case "$1" in
        notify) aws sns publish --topic-arn "$HARNESS_TOPIC" --subject "$2" --message "$3" ;;
        zero)
            aws autoscaling set-desired-capacity --auto-scaling-group-name "$HARNESS_GROUP" --desired-capacity 0 ||
                aws autoscaling update-auto-scaling-group --auto-scaling-group-name "$HARNESS_GROUP" --min-size 0 \
                    --desired-capacity 0
            ;;
        complete)
            aws autoscaling complete-lifecycle-action --auto-scaling-group-name "$HARNESS_GROUP" \
                --instance-id "$instance" --lifecycle-hook-name "$2" --lifecycle-action-result "$3"
            ;;
        leave)
            aws autoscaling terminate-instance-in-auto-scaling-group --instance-id "$instance" \
                --no-should-decrement-desired-capacity
            ;;
        *) return 1 ;; # is_outdated: without boto3 it is not known
    esac >/dev/null
}

main "$@"
