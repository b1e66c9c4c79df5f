#!/bin/bash
# An element of an array of searchers: SEARCHERS_PER_NODE of them on one node, each in a step of its own. Submitted by
# launch/slurm.sh, also for a run that is at work. They may be killed at any time: a death costs the batch in flight.
# With ROLE=evaluator it is the job of the evaluator. A trainer that has ended for good cancels both.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. launch/slurm_cluster.sh
workdir_of "$@"
count=$SEARCHERS_PER_NODE takes=("$SEARCHER_GPUS" "$SEARCHER_CPUS" "$SEARCHER_MEMORY")
[[ ${ROLE:=searcher} != evaluator ]] || count=1 takes=("$EVALUATOR_GPUS" "$EVALUATOR_CPUS" "$EVALUATOR_MEMORY")
role_step "$ROLE" "${takes[@]}" --nodes=1 --ntasks=1 -- "$@"
if [[ -n ${PRINT_STEPS:-} ]]; then
  for ((i = 0; i < count; i++)); do echo "  ${step[*]}"; done
  exit
fi

wait_for_workdir
pids=()
for ((i = 0; i < count; i++)); do
  "${restart[@]}" launch/slurm_step.sh "${step[@]}" &
  pids+=($!)
done
# Bad input (2), missing rewards (5) and storage that forbids (7) would end it in the same way again. Its end is its own: the run goes on.
asked=0 final=0 died=''
for pid in "${pids[@]}"; do
  wait "$pid" && code=0 || code=$?
  case $code in
    0 | 130) asked=1 ;;
    2 | 5 | 7) final=$code ;;
    *) died=$code ;;
  esac
done
[[ ! -e $WORKDIR/finished.json ]] || exit 0
if [[ -z $died ]] && ((asked == 0)); then exit "$final"; fi
# Where the roles meet elsewhere (--shared), nothing here tells whether the run has finished or Slurm asked them to stop.
if [[ -z $died && -e $WORKDIR/shared.json ]]; then exit 0; fi
queue_again "${died:-0}"
