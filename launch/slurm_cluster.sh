# What a Slurm cluster and a run on it are: read by launch/slurm.sh, which submits, and by the jobs themselves.
# Each variable may be set in the environment instead: PARTITION=a100 SEARCHERS=16 launch/slurm.sh …
# shellcheck shell=bash disable=SC2034
set -a # all of these are for the jobs, too

# Where jobs go. "": the cluster's default.
: "${ACCOUNT:=}" "${PARTITION:=}" "${QOS:=}" "${CONSTRAINT:=}"
: "${SEARCHER_PARTITION:=$PARTITION}" "${SEARCHER_QOS:=$QOS}"  # a preemptible one suits searchers
: "${GPU_TYPE:=}"                # a100 makes --gres=gpu:a100:4 of --gres=gpu:4
: "${SBATCH_MORE:=}"             # further options of sbatch, separated by spaces: '--exclusive --exclude=node7'

# The trainer: one sharded program over all GPUs of its tasks. GPUs, CPUs and memory (GiB; 0: not asked for) are those of a node.
: "${TRAINER_NODES:=1}" "${TRAINER_GPUS:=4}" "${TRAINER_CPUS:=24}" "${TRAINER_MEMORY:=96}" "${TRAINER_TIME:=24:00:00}"
: "${TRAINER_TASKS:=node}"       # node: one process a node, which takes all its GPUs; gpu: one process a GPU
# Seconds that the other processes have to end once the first has ended: more than trainer.heartbeat_seconds.
: "${TRAINER_GRACE:=90}"

# The evaluator. step: in the trainer's job, so that each of its nodes is asked for these GPUs too; job: a job of its own; none.
: "${EVALUATOR:=step}" "${EVALUATOR_GPUS:=1}" "${EVALUATOR_CPUS:=8}" "${EVALUATOR_MEMORY:=32}"

# The searchers: an array whose elements hold SEARCHERS_PER_NODE each, for clusters that give whole nodes.
: "${SEARCHERS:=4}" "${SEARCHERS_PER_NODE:=1}" "${SEARCHER_GPUS:=1}" "${SEARCHER_CPUS:=8}" "${SEARCHER_MEMORY:=32}"
: "${SEARCHER_TIME:=24:00:00}"

# Programs. CONTAINER: none, pyxis (srun --container-image) or apptainer (apptainer exec). A container is shown the checkout, the
# workdir, HF_HOME and CONTAINER_MOUNTS (SOURCE:TARGET, separated by commas).
: "${CONTAINER:=none}" "${CONTAINER_IMAGE:=}" "${CONTAINER_MOUNTS:=}"
if [[ $CONTAINER == none ]]; then : "${PYTHON:=$PWD/.venv/bin/python}"; else : "${PYTHON:=python}"; fi
: "${HF_HOME:=$HOME/.cache/huggingface}"  # on a file system that all nodes share
: "${HF_HUB_OFFLINE:=0}"         # 1 where nodes have no network: download models and data sets to HF_HOME before

# Ends.
: "${STOP_SECONDS:=180}"         # so long before the time limit the roles are asked to stop; Slurm looks at limits every 30 s
: "${DEATHS:=3}"                 # a role that dies is run again within its job so often, where it lived less than 10 minutes
: "${REQUEUES:=20}"              # and after that its job queues again so often
set +a

refuse() { echo "error: $*" >&2; exit 2; }

# workdir_of FLAGS…: sets WORKDIR from --workdir=DIR, and `restart`, which runs a role again that dies or whose storage fails
workdir_of() {
  local flag
  for flag in "$@"; do case $flag in --workdir=*) WORKDIR=$(realpath -m -- "${flag#*=}") ;; esac; done
  [[ -n ${WORKDIR:-} ]] || refuse "--workdir=DIR is missing: the folder of the run, on a file system that all nodes share"
  export WORKDIR
  # In the job's shell, so outside of a container: any Python from 3.7 on will do.
  local python=python3
  [[ $CONTAINER != none ]] || python=$PYTHON
  restart=("$python" -m tba_jax.run.restart "--workdir=$WORKDIR" "--deaths=$DEATHS")
}

gres() { # GPUs on a node: the option that asks for them; nothing for none
  (($1 == 0)) || echo "--gres=gpu:${GPU_TYPE:+$GPU_TYPE:}$1"
}

memory() { # GiB: the option of a job that asks for them; nothing for 0
  (($1 == 0)) || echo "--mem=${1}G"
}

# role_step ROLE GPUS CPUS MEMORY OPTIONS… -- FLAGS…: sets `step`, the srun of a role. --exact: it takes what it names and no more, so
# that steps of a job run side by side. A step without memory shares that of its job; it would wait for all of it else. A change of
# the schedule is for the trainer alone: the others take it from the run.
role_step() {
  local flag changed='' mounts=$PWD,$WORKDIR,$HF_HOME${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
  mapfile -t step < <(gres "$2"; memory "$4")
  (($4 != 0)) || step+=(--mem=0)
  step=(srun --exact --mpi=none "--cpus-per-task=$3" "${step[@]}")
  local role=$1 command=("$PYTHON" -m tba_jax.main)
  shift 4
  while [[ $1 != -- ]]; do step+=("$1"); shift; done
  shift
  for flag in "$@"; do case $flag in --allow_change=*) [[ $role == trainer ]] || changed=,${flag#*=}, ;; esac; done
  for flag in "$@"; do
    if [[ -n $changed && $flag == --allow_change=* ]]; then continue; fi
    if [[ $flag == --config.*=* && $changed == *,"$(cut -d= -f1 <<<"${flag#--config.}")",* ]]; then continue; fi
    command+=("$flag")
  done
  command+=("--role=$role")
  case $CONTAINER in
    pyxis)
      step+=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts" "--container-workdir=$PWD" \
        --container-env=HF_HOME,HF_HUB_OFFLINE) ;;
    apptainer) command=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER_IMAGE" "${command[@]}") ;;
  esac
  step+=("${command[@]}")
}

# A mount that is lost leaves an empty folder, in which the roles would begin another run. launch/slurm.sh has made DIR/logs.
wait_for_workdir() {
  echo "$(date -Is) start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST" >&2
  [[ -d $WORKDIR/logs ]] || echo "$WORKDIR is empty or not there at the moment; waiting until it is back" >&2
  until [[ -d $WORKDIR/logs ]]; do sleep "${LOOK_SECONDS:-30}"; done
}

# give_up CODE: for the end of a trainer that nothing would make better. Searchers would hold their nodes, and queue again, for ever.
give_up() {
  echo "the trainer has ended with code $1 for good: its searchers are cancelled" >&2
  xargs -r scancel <"$WORKDIR/logs/slurm-joined" || true
  exit "$1"
}

# queue_again CODE: for the end of a job whose run has not finished. Ends that were asked for are free; others are counted, in a file
# of the run because a job that queues again forgets, as long as the job lived less than 10 minutes.
queue_again() {
  # The id of one element of an array may also be that of the whole array: name the element.
  local id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
  local counted=$WORKDIR/logs/deaths-$id
  if (($1 != 0 && $1 != 130)); then
    ((SECONDS < 600)) || rm -f "$counted"
    echo "$(date -Is) code $1 after $SECONDS s on ${SLURM_JOB_NODELIST:-}" >>"$counted" || true
    if (($(wc -l <"$counted" || echo 0) > REQUEUES)); then
      echo "ended with code $1, after $REQUEUES times in the queue: see $counted" >&2
      [[ -n ${SLURM_ARRAY_JOB_ID:-} || ${ROLE:-trainer} != trainer ]] || give_up "$1"
      exit 1
    fi
  fi
  echo "job $id ended with code $1 before the run had finished: it queues again" >&2
  scontrol requeue "$id"
}
