#!/usr/bin/env bash
# What the container of a pod runs: a role of the run in WORKDIR, until the run has finished or the pod has to end.
#
#   WORKDIR=/runs/stories RUN='--config=configs/story_sentiment.py --config.seed=1' launch/kubernetes/role.sh --role=trainer …
#
#   WORKDIR  the run's folder, on the volume that all pods share
#   RUN      flags of the run, the same for every role, in any number of lines; no spaces inside a flag
#   DEATHS   deaths in a row after which the role is run again in this pod, which keeps its node
#
# tba_jax.run.restart runs the role again; here it is run again, too, after the end of another process of its trainer (6), and after
# a request to stop that went to another process of it (0 or 130). Any other end is that of the pod, and the podFailurePolicy of its
# Job reads the pod's exit code:
#
#   0      the run has finished, or this searcher rests because no row has had a reward (5)
#   2      bad input before there was a run; of a trainer's processes, process 0 alone says so, as others only hear of its end
#   4, 7   numbers that are not finite, storage that forbids: like bad input, they would end the role in the same way again
#   other  a death, or a request to stop (143): another pod takes the place of this one
set -u
: "${WORKDIR:?set it to the folder of the run}" "${RUN:?set it to the flags of the run, --config=configs/X.py at least}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export WORKDIR JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR-$WORKDIR/compilation_cache}
read -r -d '' -a flags <<<"$RUN"
role='' process=0 asked='' pid=''
for flag in "$@"; do case $flag in --role=*) role=${flag#*=} ;; --process=*) process=${flag#*=} ;; esac; done
trap 'asked=1; [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null' TERM INT

run_role() {
  python -m tba_jax.run.restart --workdir="$WORKDIR" --deaths="${DEATHS:-1}" \
    python -m tba_jax.main --workdir="$WORKDIR" "${flags[@]}" "$@" &
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
    sleep 1
  done
  return 1
}

while :; do
  run_role "$@"
  [[ $code -ne 0 ]] || ! is_finished || exit 0
  echo "role.sh: $role ended with code $code before the run was done${asked:+, as it was asked to}" >&2
  case $code in
    0 | 130) [[ -z $asked ]] || exit 143 ;;
    6) [[ -z $asked ]] || exit 6 ;;
    *) break ;;
  esac
  sleep 1
  [[ -z $asked ]] || exit 143
done
[[ $code -ne 2 || -z $asked ]] || exit 143
[[ $code -ne 5 || $role != searcher ]] || exit 0
# After the training the run waits for nobody but the evaluator.
[[ $role != evaluator || ! -e $WORKDIR/finished.json || -n $asked ]] || exit 0
if ((code == 2)) && { ((process > 0)) || [[ -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]]; }; then exit 1; fi
exit "$code"
