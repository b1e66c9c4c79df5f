#!/bin/bash
# Searchers of a run, one for each element of the array. They may start at any time, in any number, and be killed at any time,
# so cheap preemptible partitions suit them: a death costs the batch in flight. Submit from the checkout:
#
#   export WORKDIR=/shared/runs/stories RUN='--config=configs/story_sentiment.py --config.seed=1'   # needs the extra `stories`
#   sbatch --array=0-15 launch/slurm_searchers.sh
#
# WORKDIR, RUN and PYTHON as in launch/slurm.sh.
# Not run on a cluster: its shell was exercised with stand-ins for srun and scontrol.
#SBATCH --job-name=tba-searcher
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
# Asked to stop, a searcher completes its batch; the job then queues again, until the run has finished.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
: "${WORKDIR:?set it to the shared folder of the run}" "${RUN:?set it to the flags of the run, --config=configs/X.py at least}"
cd "$SLURM_SUBMIT_DIR"
read -r -a flags <<<"$RUN"

export WORKDIR
# again.sh runs a searcher again whose storage fails.
launch/again.sh srun "${PYTHON:-$PWD/.venv/bin/python}" -m tba_jax.main --workdir="$WORKDIR" "${flags[@]}" --role=searcher && code=0 || code=$?

[[ ! -e $WORKDIR/finished.json ]] || exit 0
# Bad input and missing rewards would end it in the same way again. Its end is its own: the run goes on.
case $code in 2 | 5) exit "$code" ;; esac
((${SLURM_RESTART_COUNT:-0} < 100)) || { echo "ended with code $code after $SLURM_RESTART_COUNT restarts" >&2; exit 1; }
# The id of one element of an array may also be that of the whole array: name the element.
scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
