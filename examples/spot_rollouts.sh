#!/usr/bin/env bash
# A preemptible machine generates for a running job, and hands over when its notice comes.
#
#     MANAGER=http://10.0.0.5:7000 TOKEN=… ./spot_rollouts.sh --tp-size 2 --mem-fraction-static 0.85
#
# MANAGER and TOKEN are those of the job's rollout manager: `rollouts.json` in the job's directory has both. The machine
# needs gyre-rl and SGLang, and a way to MANAGER; nobody needs a way to it. Arguments go to the engine.
#
# A cloud's notice of preemption becomes a file (NOTICE): `gyre join` then hands its samples over within a second and
# leaves with status 0. SIGTERM does the same. Killed without notice, its samples go on elsewhere from their last
# reported token. Run it under whatever starts machines again: a new one needs no preparation.
set -euo pipefail

: "${MANAGER:?the rollout manager, such as http://10.0.0.5:7000}"
: "${TOKEN:?its token}"
CLOUD="${CLOUD:-none}"                     # aws, gce, or none where SIGTERM is the notice
NOTICE="${NOTICE:-$(mktemp -u -t gyre-notice.XXXXXX)}"
LIMITS=()                                  # what the engine says of itself, unless MAX_RUNNING or KV_TOKENS say less
[ -z "${MAX_RUNNING:-}" ] || LIMITS+=(--max-running "$MAX_RUNNING")
[ -z "${KV_TOKENS:-}" ] || LIMITS+=(--kv-tokens "$KV_TOKENS")
METADATA="${METADATA:-}"                   # where the cloud's metadata service is, for tests

watch_aws() {
    local base="${METADATA:-http://169.254.169.254}" token
    while sleep 5; do
        token="$(curl -sf -m 2 -X PUT "$base/latest/api/token" -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' || true)"
        if curl -sf -m 2 -o /dev/null -H "X-aws-ec2-metadata-token: $token" "$base/latest/meta-data/spot/instance-action"; then
            touch "$NOTICE"
            return
        fi
    done
}

watch_gce() {
    local base="${METADATA:-http://metadata.google.internal}"
    # The service answers when the value changes: no polling, but a connection that may break.
    until [ "$(curl -sf -m 330 -H 'Metadata-Flavor: Google' \
        "$base/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=300" || true)" = TRUE ]; do
        sleep 1
    done
    touch "$NOTICE"
}

watcher=""
case "$CLOUD" in
    aws | gce)
        "watch_$CLOUD" &
        watcher=$!
        ;;
    none) ;;
    *)
        echo "CLOUD is '$CLOUD'; it is one of aws, gce, none." >&2
        exit 2
        ;;
esac

gyre join "$MANAGER" --token "$TOKEN" --engine sglang --notice-file "$NOTICE" \
    ${LIMITS[@]+"${LIMITS[@]}"} -- "$@" &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null || true' TERM INT
status=0
wait "$agent" || status=$?
while kill -0 "$agent" 2>/dev/null; do # a signal ended the wait, not the agent: it is handing over
    status=0
    wait "$agent" || status=$?
done
if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null || true
fi
rm -f "$NOTICE"
exit "$status"
