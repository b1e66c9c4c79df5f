#!/bin/bash
# The job of a trainer over TRAINER_NODES nodes and, in a step beside it, of the evaluator. Submitted by launch/slurm.sh.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. launch/slurm_cluster.sh
workdir_of "$@"

tasks=1 # on each node
[[ $TRAINER_TASKS == node ]] || tasks=$TRAINER_GPUS
role_step evaluator "$EVALUATOR_GPUS" "$EVALUATOR_CPUS" "$EVALUATOR_MEMORY" --nodes=1 --ntasks=1 -- "$@"
evaluator=("${step[@]}")
# All tasks see all GPUs of the step on their node, and the processes choose theirs. They find each other from what Slurm tells them.
# srun waits for the others once one has ended: each ends with a code of its own, which says why.
role_step trainer "$TRAINER_GPUS" $((TRAINER_CPUS / tasks)) "$TRAINER_MEMORY" "--nodes=$TRAINER_NODES" \
  "--ntasks=$((TRAINER_NODES * tasks))" "--ntasks-per-node=$tasks" --kill-on-bad-exit=0 "--wait=$TRAINER_GRACE" -- "$@"
if [[ -n ${PRINT_STEPS:-} ]]; then
  echo "  ${step[*]}"
  [[ $EVALUATOR != step ]] || echo "  ${evaluator[*]}"
  exit
fi

wait_for_workdir
waited=
if [[ $EVALUATOR == step ]]; then
  "${restart[@]}" launch/slurm_step.sh "${evaluator[@]}" &
  waited=$!
fi
"${restart[@]}" launch/slurm_step.sh "${step[@]}" && code=0 || code=$?

# Where the roles meet elsewhere (--shared), the file that says whether the run is done is there; code 130 says it is not.
if ((code == 0)) && [[ -e $WORKDIR/finished.json || -e $WORKDIR/shared.json ]]; then
  [[ -z $waited ]] || wait "$waited" || echo "the run has finished; its evaluator ended with code $?" >&2
  exit 0
fi
# Numbers that are not finite and storage that forbids would end it in the same way again, and so would bad input; later a hub may
# be away for a moment.
if ((code == 4 || code == 7 || code == 2 && ${SLURM_RESTART_COUNT:-0} == 0 && SECONDS < 600)); then give_up "$code"; fi
queue_again "$code"
