#!/usr/bin/env bash
# What the container of a pod runs: a role of the run in WORKDIR, until the run has finished or the pod has to end.
#
#   WORKDIR=/runs/stories RUN='--config=configs/story_sentiment.py --config.seed=1' launch/kubernetes/role.sh --role=trainer …
#
#   WORKDIR  the run's folder, on the volume that all pods share
#   RUN      flags of the run, the same for every role, in any number of lines; no spaces inside a flag
#
# The role is run again in this pod, which keeps its node, after failed storage (3, by
# tba_jax.run.restart), after the end of another process of its trainer (6), after a request to stop that went to another process of its trainer (0 or 130), and after any end but 4, 5 and 7
# that followed ten minutes of life, such as a meeting to which not all processes of a trainer came. Any other end is that of the
# pod, and the podFailurePolicy of its Job reads the pod's exit code:
#
#   0      the run has finished, or this searcher rests because no row has had a reward (5)
#   2      bad input before there was a run; of a trainer's processes, process 0 alone says so, as others only hear of its end
#   4, 7   numbers that are not finite, storage that forbids: like bad input, they would end the role in the same way again
#   other  a death, or a request to stop: another pod takes the place of this one
set -u
: "${WORKDIR:?set it to the folder of the run}" "${RUN:?set it to the flags of the run, --config=configs/X.py at least}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export WORKDIR JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR-$WORKDIR/compilation_cache}
read -r -d '' -a flags <<<"$RUN"
role='' process=0 asked='' pid='' code=0 pause=${FIRST_PAUSE:-1} deaths=0
for flag in "$@"; do case $flag in --role=*) role=${flag#*=} ;; --process=*) process=${flag#*=} ;; esac; done
trap 'asked=1; [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null' TERM INT

say() { echo "$(basename "$0"): $*" >&2; }
is_there() { [[ -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]]; }

# A request to stop ends the pause.
rest() {
  [[ -z $asked ]] || return 0
  sleep "$1" &
  pid=$!
  wait "$pid"
  kill "$pid" 2>/dev/null
}

run_role() {
  python -m tba_jax.run.restart --workdir="$WORKDIR" python -m tba_jax.main --workdir="$WORKDIR" "${flags[@]}" "$@" &
  pid=$!
  [[ -z $asked ]] || kill -TERM "$pid" 2>/dev/null  # it came before the role was known
  # A signal interrupts `wait`, with a code above 128, while the role still ends: wait on.
  while wait "$pid" && code=0 || code=$?; ((code > 128)) && kill -0 "$pid" 2>/dev/null; do :; done
  wait "$pid" && code=0 || code=$?
}

# Whether the run is done. A network file system may show the file to other nodes a minute late.
is_finished() {
  for ((waited = 0; waited < ${FINISH_SECONDS:-60}; waited++)); do
    [[ ! -e $WORKDIR/finished.json ]] || return 0
    [[ -z $asked ]] || return 1
    rest 1
  done
  [[ -e $WORKDIR/finished.json ]]
}

while :; do
  began=$SECONDS
  run_role "$@"
  [[ $code -ne 0 ]] || ! is_finished || exit 0
  if [[ -n $asked ]]; then
    say "asked to stop; $role ended with code $code before the run was done"
    case $code in 0 | 2 | 130) exit 143 ;; *) exit "$code" ;; esac
  fi
  lived=$((SECONDS - began)) again="running it again"
  ((lived < ${HEALTHY_SECONDS:-600})) || pause=${FIRST_PAUSE:-1} deaths=0
  case $code in
    0 | 6 | 130) say "$role ended with code $code: another process of it has ended or was asked to stop; $again" ;;
    4 | 7) exit "$code" ;;
    5)
      [[ $role == searcher ]] || exit 5
      say "no row has had a reward; this searcher rests, and is not started again"
      exit 0
      ;;
    *)
      # After the training the run waits for nobody but the evaluator.
      if [[ $role == evaluator && -e $WORKDIR/finished.json ]]; then
        deaths=$((deaths + 1))
        ((deaths <= ${MAX_RESTARTS:-20})) || { say "the evaluator died $deaths times and is given up: the training is done"; exit 0; }
      elif ((lived < ${HEALTHY_SECONDS:-600})); then
        ((code != 2)) || is_there || ((process > 0)) || exit 2
        exit $((code == 2 ? 1 : code))
      fi
      say "$role ended with code $code; $again"
      ;;
  esac
  rest "$pause"
  [[ -z $asked ]] || exit 143
  pause=$((pause < 30 ? 2 * pause : 60))
done
