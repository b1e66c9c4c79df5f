#!/usr/bin/env bash
# Submits a run to a Slurm cluster: a job of the trainer and the evaluator, and an array of searchers. Run it on a login node, from
# a checkout that all nodes see. The roles meet in DIR alone: no job waits for another to be scheduled.
#
#   launch/slurm.sh [--dry_run] --config=configs/X.py --workdir=DIR [--config.x=y ...]
#   SEARCHERS=16 launch/slurm.sh --only=searchers --workdir=DIR     # more searchers, whenever there is room
#   launch/slurm.sh --only=trainer --workdir=DIR                    # the trainer and the evaluator: resumes a run
#
# --dry_run prints what would be submitted, and the steps of each job. launch/slurm_cluster.sh has all variables: account,
# partitions, nodes, GPUs, times, container; set them there, or in the environment.
# Jobs queue again before their time limit, when a node is lost and when a role dies, until the run has finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$OLDPWD
. launch/slurm_cluster.sh

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//p}' launch/slurm.sh >&2; exit 2; }

one_of() { # NAME CHOICE…
  local name=$1 choice
  shift
  for choice in "$@"; do [[ ${!name} != "$choice" ]] || return 0; done
  refuse "$name=${!name} must be one of $*"
}

dry_run='' only=all flags=()
for flag in "$@"; do
  case $flag in
    --dry_run) dry_run=1 ;;
    --only=*) only=${flag#*=} && one_of only trainer searchers ;;
    --role=* | --coordinator=* | --processes=* | --process=*) refuse "$flag is set by the jobs: leave it out" ;;
    --workdir=) refuse "--workdir= needs a folder" ;;
    --workdir=*) flags+=("--workdir=$(cd "$here" && realpath -m -- "${flag#*=}")") ;;
    --help) usage ;;
    --*) flags+=("$flag") ;;
    *) refuse "'$flag' is no flag: flags of the run are written --NAME=VALUE" ;;
  esac
done
((${#flags[@]})) || usage
workdir_of "${flags[@]}"

# sbatch refuses numbers and times that it does not know; what it does not see is checked here.
one_of TRAINER_TASKS node gpu
one_of EVALUATOR step job none
one_of CONTAINER none pyxis apptainer
if [[ $TRAINER_TASKS == gpu ]] && ((TRAINER_GPUS == 0 || TRAINER_CPUS % TRAINER_GPUS)); then
  refuse "TRAINER_TASKS=gpu needs GPUs that divide the CPUs, not TRAINER_GPUS=$TRAINER_GPUS and TRAINER_CPUS=$TRAINER_CPUS"
fi
((SEARCHERS_PER_NODE > 0 && SEARCHERS % SEARCHERS_PER_NODE == 0)) ||
  refuse "SEARCHERS=$SEARCHERS must be a multiple of SEARCHERS_PER_NODE=$SEARCHERS_PER_NODE"
[[ $EVALUATOR != step ]] || ((!TRAINER_MEMORY == !EVALUATOR_MEMORY)) ||
  refuse "TRAINER_MEMORY=$TRAINER_MEMORY and EVALUATOR_MEMORY=$EVALUATOR_MEMORY must both be 0, or neither, as they share a job"
[[ $only != searchers ]] || ((SEARCHERS > 0)) || refuse "SEARCHERS=$SEARCHERS leaves nothing to submit with --only=searchers"
[[ $CONTAINER == none || -n $CONTAINER_IMAGE ]] || refuse "CONTAINER=$CONTAINER needs CONTAINER_IMAGE"
[[ $CONTAINER != none || -x $PYTHON || $PYTHON != */* ]] ||
  refuse "PYTHON=$PYTHON is no program: make venv makes it, or name another"
[[ " ${flags[*]}" == *' --config='* ]] || [[ -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]] ||
  refuse "$WORKDIR holds no run yet: --config=RECIPE says what a new one is"

# submit NAME SCRIPT OPTIONS…
submit() {
  local partition=$PARTITION qos=$QOS log=%j more command said
  if [[ $1 == searcher ]]; then partition=$SEARCHER_PARTITION qos=$SEARCHER_QOS log=%A_%a; fi
  read -r -a more <<<"$SBATCH_MORE"
  # TERM without B: goes to the steps, not to the job's shell, which goes on to queue the job again.
  command=(sbatch "--job-name=$(basename "$WORKDIR")-$1" "--output=$WORKDIR/logs/slurm-$1-$log.log" --open-mode=append \
    --requeue "--signal=TERM@$STOP_SECONDS" --export=ALL ${ACCOUNT:+"--account=$ACCOUNT"} ${partition:+"--partition=$partition"} \
    ${qos:+"--qos=$qos"} ${CONSTRAINT:+"--constraint=$CONSTRAINT"} "${@:3}" "${more[@]}" "$2" "${flags[@]}")
  if [[ -n $dry_run ]]; then
    echo "${command[*]}"
    PRINT_STEPS=1 SLURM_SUBMIT_DIR=$PWD ROLE=$1 bash "$2" "${flags[@]}"
    return
  fi
  said=$(ROLE=$1 "${command[@]}")
  echo "$said ($1)"
  [[ $1 == trainer ]] || echo "${said##* }" >>"$WORKDIR/logs/slurm-joined"
}

# A folder of the run that is there from now on: by it the jobs know that they see the file system on which the run is.
[[ -n $dry_run ]] || mkdir -p "$WORKDIR/logs" || refuse "--workdir=$WORKDIR cannot be made"
if [[ $only != searchers ]]; then
  gpus=$TRAINER_GPUS cpus=$TRAINER_CPUS memory=$TRAINER_MEMORY
  if [[ $EVALUATOR == step ]]; then
    gpus=$((gpus + EVALUATOR_GPUS)) cpus=$((cpus + EVALUATOR_CPUS))
    ((memory == 0)) || memory=$((memory + EVALUATOR_MEMORY))
  fi
  mapfile -t asked < <(gres "$gpus"; memory "$memory")
  submit trainer launch/slurm_job.sh "--nodes=$TRAINER_NODES" --ntasks-per-node=1 "--cpus-per-task=$cpus" "${asked[@]}" \
    "--time=$TRAINER_TIME"
  if [[ $EVALUATOR == job ]]; then
    mapfile -t asked < <(gres "$EVALUATOR_GPUS"; memory "$EVALUATOR_MEMORY")
    submit evaluator launch/slurm_searchers.sh --nodes=1 --ntasks=1 "--cpus-per-task=$EVALUATOR_CPUS" "${asked[@]}" \
      "--time=$TRAINER_TIME"
  fi
fi
if [[ $only != trainer ]] && ((SEARCHERS > 0)); then
  mapfile -t asked < <(gres $((SEARCHERS_PER_NODE * SEARCHER_GPUS)); memory $((SEARCHERS_PER_NODE * SEARCHER_MEMORY)))
  submit searcher launch/slurm_searchers.sh "--array=0-$((SEARCHERS / SEARCHERS_PER_NODE - 1))" --nodes=1 --ntasks=1 \
    "--cpus-per-task=$((SEARCHERS_PER_NODE * SEARCHER_CPUS))" "${asked[@]}" "--time=$SEARCHER_TIME"
fi
