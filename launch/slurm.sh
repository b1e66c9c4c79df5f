#!/bin/bash
# One role of a run as a Slurm job. Submit it from the checkout, on a file system that all nodes see, in any order: the roles meet
# in DIR alone. Options of sbatch replace those below; `sbatch --test-only` says what the cluster thinks of them.
#
#   mkdir -p DIR/logs
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh --role=trainer --config=configs/X.py --workdir=DIR
#   sbatch --array=0-15 --gpus-per-node=1 launch/slurm.sh --role=searcher --config=configs/X.py --workdir=DIR
#   sbatch --gpus-per-node=1 launch/slurm.sh --role=evaluator --config=configs/X.py --workdir=DIR
#
#   PYTHON=.venv/bin/python   the Python of the checkout, or of the container
#   WRAP='apptainer exec --nv IMAGE', or options of srun: WRAP='--container-image=IMAGE --container-mounts=/shared'
#SBATCH --job-name=tba --ntasks-per-node=1 --cpus-per-task=8 --mem-per-cpu=4G --time=24:00:00
# So long before the limit the steps are asked to stop: a trainer saves its checkpoint. Slurm looks at limits every 30 seconds.
#SBATCH --requeue --open-mode=append --signal=TERM@180
# What travels from the submitting shell. Tokens do not: log in by files of HOME (hf auth login, wandb login).
#SBATCH --export=HOME,USER,PATH,LANG,LD_LIBRARY_PATH,TMPDIR,PYTHON,WRAP,HF_HOME,HF_HUB_OFFLINE,JAX_PLATFORMS,XLA_FLAGS,NCCL_SOCKET_IFNAME
set -euo pipefail

trainer=0 workdir=
for flag in "$@"; do case $flag in --role=trainer) trainer=1 ;; --workdir=*) workdir=${flag#*=} ;; esac; done
: "${workdir:?--workdir=DIR is missing: the folder of the run, which all nodes see}"
# A lost mount leaves an empty folder, in which the roles would begin another run.
until [[ -d $workdir/logs ]]; do echo "$workdir/logs is not there; waiting for it" >&2; sleep 30; done

python=${PYTHON:-.venv/bin/python} end=$workdir/logs/end-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} code=0
read -r -a wrap <<<"${WRAP:-}"
# The wrapper of each process decides whether it starts again. Where one of a trainer has ended for good, srun ends the others.
srun --mpi=none --kill-on-bad-exit=$trainer --cpus-per-task="$SLURM_CPUS_PER_TASK" "${wrap[@]}" "$python" -m tba_jax.run.restart \
  --workdir="$workdir" --deaths=20 --end="$end" "$python" -m tba_jax.main "$@" || code=$?
ends=$(cat "$end".* 2>/dev/null || true)
if [[ $ends == *code* ]]; then
  echo "a role has ended for good: ${ends//$'\n'/, }" >&2
  # Without a trainer the run's other jobs would hold their nodes, and queue again, for ever.
  ((!trainer)) || squeue --noheader --user="$USER" --format="%A %o " | grep -F -- " --workdir=$workdir " |
    awk -v own="$SLURM_JOB_ID" '$1 != own {print $1}' | xargs -r scancel
  exit 1
fi
# A wrapper that is killed from outside leaves no file. An element of an array has a name of its own.
if [[ $ends || $code == 137 || $code == 143 ]]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
