#!/bin/bash
# The job of a trainer over TRAINER_NODES nodes and, in a step beside it, of the evaluator. Submitted by launch/slurm.sh.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. launch/slurm_cluster.sh
workdir_of "$@"

tasks=1 # on each node
[[ $TRAINER_TASKS == node ]] || tasks=$TRAINER_GPUS
mapfile -t of_trainer < <(gres "$TRAINER_GPUS"; step_memory "$TRAINER_MEMORY")
role_command trainer "$@"
# All tasks see all GPUs of the step on their node, and the processes choose theirs. They find each other from what Slurm tells them.
# srun waits for the others once one has ended: each ends with a code of its own, which says why.
trainer=(srun --nodes="$TRAINER_NODES" --ntasks=$((TRAINER_NODES * tasks)) --ntasks-per-node="$tasks" --exact \
  --cpus-per-task=$((TRAINER_CPUS / tasks)) "${of_trainer[@]}" --mpi=none --kill-on-bad-exit=0 --wait="$TRAINER_GRACE" \
  "${container[@]}" "${role[@]}")
role_command evaluator "$@"
one_process "$EVALUATOR_GPUS" "$EVALUATOR_CPUS" "$EVALUATOR_MEMORY"
evaluator=(srun "${place[@]}" --mpi=none "${container[@]}" "${role[@]}")
if [[ -n ${PRINT_STEPS:-} ]]; then
  echo "  ${trainer[*]}"
  [[ $EVALUATOR != step ]] || echo "  ${evaluator[*]}"
  exit
fi

echo "$(date -Is) start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" >&2
wait_for_workdir
# It runs a role again whose storage failed, and DEATHS times one that died.
waited=
if [[ $EVALUATOR == step ]]; then
  "${restart[@]}" launch/slurm_step.sh "${evaluator[@]}" &
  waited=$!
fi
"${restart[@]}" launch/slurm_step.sh "${trainer[@]}" && code=0 || code=$?

# Where the roles meet elsewhere (--shared), the file that says whether the run is done is there; code 130 says it is not.
if ((code == 0)) && [[ -e $WORKDIR/finished.json || -e $WORKDIR/shared.json ]]; then
  [[ -z $waited ]] || wait "$waited" || echo "the run has finished; its evaluator ended with code $?" >&2
  exit 0
fi
# Numbers that are not finite and storage that forbids would end it in the same way again, and so would bad input; later a hub may
# be away for a moment.
if ((code == 4 || code == 7 || code == 2 && ${SLURM_RESTART_COUNT:-0} == 0 && SECONDS < 600)); then give_up "$code"; fi
queue_again "$code"
