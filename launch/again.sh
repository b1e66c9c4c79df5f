#!/usr/bin/env bash
# Runs a role, and runs it again as long as its storage fails (exit code 3), after pauses that grow to a minute. Every other code
# is that of this script. A role that is asked to stop is not run again.
#
#   WORKDIR=DIR launch/again.sh python -m tba_jax.main --workdir=DIR --role=searcher …
#
#   DEATHS=0   so many deaths in a row, each after less than 10 minutes of life, are answered by another run too. A death is every
#              code but 0, 2, 3, 4, 5 and 130: a crash, a kill, or 6: another process of this trainer has ended. So is bad input (2)
#              of a role that lived before: a hub may be away for a moment, or a port not yet free.
#
# It waits until the run is in WORKDIR again: without that, a role would begin a new run in the place of one whose mount is lost.
set -u
: "${WORKDIR:?set it to the folder of the run}"
asked='' pid='' pause=${FIRST_PAUSE:-1} deaths=0 lives=0
trap 'asked=1; [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null' TERM INT

while :; do
  began=$SECONDS lives=$((lives + 1))
  "$@" &
  pid=$!
  [[ -z $asked ]] || kill -TERM "$pid" 2>/dev/null  # it came before the role was known
  # A signal interrupts `wait`, with a code above 128, while the role still ends its batch: wait on.
  while wait "$pid" && code=0 || code=$?; ((code > 128)) && kill -0 "$pid" 2>/dev/null; do :; done
  wait "$pid" && code=0 || code=$?
  if [[ -n $asked ]]; then exit "$code"; fi
  if ((SECONDS - began >= 600)); then deaths=0 pause=${FIRST_PAUSE:-1}; fi
  case $code in
    0 | 4 | 5 | 130) exit "$code" ;;
    3) ;;
    *)
      if ((code == 2 && lives == 1)); then exit 2; fi
      if ((++deaths > ${DEATHS:-0})); then exit "$code"; fi
      ;;
  esac
  told=''
  while :; do
    sleep "$pause" &
    pid=$!
    wait "$pid"
    [[ -z $asked ]] || exit "$code"
    pause=$((pause < 30 ? 2 * pause : 60))
    # A role that died may have done so before there was a run.
    if [[ $code != 3 || -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]]; then break; fi
    [[ -n $told ]] || echo "$(basename "$0"): $WORKDIR holds no run at the moment; waiting until it is back" >&2
    told=1
  done
  reason="storage failed"
  ((code == 3)) || reason="ended with code $code"
  echo "$(basename "$0"): $reason; running the role again" >&2
done
