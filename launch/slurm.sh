#!/bin/bash
# The trainer and the evaluator of a run on one node, and an array of searchers on others. Submit from the checkout:
#
#   export WORKDIR=/shared/runs/stories RUN='--config=configs/story_sentiment.py --config.seed=1'   # needs the extra `stories`
#   sbatch launch/slurm.sh
#   sbatch --array=0-15 launch/slurm_searchers.sh        # more searchers, whenever there is room
#
#   WORKDIR    the run's folder, on a file system that all nodes share (needed)
#   RUN        flags of the run, the same for every role; no spaces inside a flag (needed)
#   SEARCHERS  searchers that the first start submits as an array; default 4; 0: none, where a job may not submit jobs
#   PYTHON     default: .venv/bin/python of the checkout
#
# The roles meet in WORKDIR alone: neither job waits for the other to be scheduled. Adapt partition, account and the counts; the
# trainer is one process and uses all GPUs of its step, split as --config.learner.mesh.* says.
# Not run on a cluster: its shell was exercised with stand-ins for srun, sbatch and scontrol.
#SBATCH --job-name=tba-trainer
#SBATCH --nodes=1
#SBATCH --gres=gpu:5
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=24:00:00
# Three minutes before the time limit the roles are asked to stop: the trainer saves a checkpoint, and the job queues again.
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
: "${WORKDIR:?set it to the shared folder of the run}" "${RUN:?set it to the flags of the run, --config=configs/X.py at least}"
cd "$SLURM_SUBMIT_DIR"
read -r -a flags <<<"$RUN"
role=("${PYTHON:-$PWD/.venv/bin/python}" -m tba_jax.main --workdir="$WORKDIR" "${flags[@]}")
restarts=${SLURM_RESTART_COUNT:-0}

if ((restarts == 0 && ${SEARCHERS:=4} > 0)); then
  sbatch --array="0-$((SEARCHERS - 1))" launch/slurm_searchers.sh
fi
# A trainer that was killed, not asked, still holds its lease of 30 seconds when another node takes over. And a job that is queued
# again has a run: where this node does not see it, it must not begin another.
if ((restarts > 0)); then
  sleep "${LEASE_SECONDS:-35}"
  until [[ -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]]; do
    echo "$WORKDIR holds no run at the moment; waiting until it is back" >&2
    sleep "${LOOK_SECONDS:-30}"
  done
fi

# --exact: a step takes what it names and no more, so that both fit into the job.
# again.sh runs a role again whose storage fails.
again=launch/again.sh
export WORKDIR
"$again" srun --ntasks=1 --exact --gres=gpu:1 --cpus-per-task=8 --mem=32G "${role[@]}" --role=evaluator &
evaluator=$!
"$again" srun --ntasks=1 --exact --gres=gpu:4 --cpus-per-task=24 --mem=96G "${role[@]}" --role=trainer && code=0 || code=$?

# A role that was asked to stop ends with 0 as well: the file says whether the run is done.
if [[ -e $WORKDIR/finished.json ]]; then
  wait "$evaluator"
  exit
fi
kill "$evaluator" 2>/dev/null || true
# Bad input and numbers that are not finite would end it in the same way again.
case $code in 2 | 4) exit "$code" ;; esac
((restarts < 20)) || { echo "ended with code $code after $restarts restarts" >&2; exit 1; }
scontrol requeue "$SLURM_JOB_ID"
