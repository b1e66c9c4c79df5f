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

dry_run='' only=all flags=()
for flag in "$@"; do
  case $flag in
    --dry_run) dry_run=1 ;;
    --only=trainer | --only=searchers) only=${flag#*=} ;;
    --only=*) refuse "$flag must be --only=trainer or --only=searchers" ;;
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

whole() { # NAME LEAST: refuses a variable that is no whole number of at least LEAST
  [[ ${!1} =~ ^(0|[1-9][0-9]{0,6})$ ]] && ((${!1} >= $2)) || refuse "$1=${!1} must be a whole number of at least $2, with at most seven digits"
}

seconds_of() { # TIME: of Slurm's minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes …
  local days=0 rest=$1 a b c
  [[ $rest != *-* ]] || { days=${rest%%-*}; rest=${rest#*-}; }
  IFS=: read -r a b c <<<"$rest"
  if [[ $1 == *-* || -n $c ]]; then
    echo $((10#$days * 86400 + 10#$a * 3600 + 10#${b:-0} * 60 + 10#${c:-0}))
  else
    echo $((10#$a * 60 + 10#${b:-0}))
  fi
}

one_of() { # NAME CHOICE…
  local choice
  for choice in "${@:2}"; do [[ ${!1} != "$choice" ]] || return 0; done
  refuse "$1=${!1} must be one of $(printf '%s, ' "${@:2:$#-2}")${*: -1}"
}

check() {
  local name
  for name in TRAINER_NODES TRAINER_CPUS EVALUATOR_CPUS SEARCHERS_PER_NODE SEARCHER_CPUS; do whole "$name" 1; done
  for name in TRAINER_GPUS TRAINER_MEMORY EVALUATOR_GPUS EVALUATOR_MEMORY SEARCHERS SEARCHER_GPUS SEARCHER_MEMORY DEATHS REQUEUES; do
    whole "$name" 0
  done
  whole TRAINER_GRACE 60 # the trainer's processes see the death of another within trainer.heartbeat_seconds, 30 by default
  whole STOP_SECONDS 60  # Slurm looks at time limits every 30 s
  one_of TRAINER_TASKS node gpu
  one_of EVALUATOR step job none
  one_of CONTAINER none pyxis apptainer
  one_of HF_HUB_OFFLINE 0 1
  for name in TRAINER_TIME SEARCHER_TIME; do
    [[ ${!name} =~ ^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$ ]] || refuse "$name=${!name} must be a time of Slurm, such as 24:00:00 or 7-00:00:00"
    ((STOP_SECONDS < $(seconds_of "${!name}") && STOP_SECONDS <= 65535)) ||
      refuse "STOP_SECONDS=$STOP_SECONDS must be less than $name=${!name}, and at most 65535: roles would be asked to stop at once"
  done
  if [[ $TRAINER_TASKS == gpu ]] && ((TRAINER_GPUS == 0 || TRAINER_CPUS % TRAINER_GPUS)); then
    refuse "TRAINER_TASKS=gpu needs GPUs that divide the CPUs, not TRAINER_GPUS=$TRAINER_GPUS and TRAINER_CPUS=$TRAINER_CPUS"
  fi
  ((SEARCHERS % SEARCHERS_PER_NODE == 0)) ||
    refuse "SEARCHERS=$SEARCHERS must be a multiple of SEARCHERS_PER_NODE=$SEARCHERS_PER_NODE"
  if [[ $EVALUATOR == step ]] && ((!TRAINER_MEMORY != !EVALUATOR_MEMORY)); then
    refuse "TRAINER_MEMORY=$TRAINER_MEMORY and EVALUATOR_MEMORY=$EVALUATOR_MEMORY must both be 0, or neither, as they share a job"
  fi
  [[ $only != searchers ]] || ((SEARCHERS > 0)) || refuse "SEARCHERS=0 leaves nothing to submit with --only=searchers"
  check_programs
}

check_programs() {
  case $CONTAINER in
    none) [[ -x $PYTHON || $PYTHON != */* ]] || refuse "PYTHON=$PYTHON is no program: make venv makes it, or name another" ;;
    *) [[ -n $CONTAINER_IMAGE ]] || refuse "CONTAINER=$CONTAINER needs CONTAINER_IMAGE" ;;
  esac
  if [[ $CONTAINER == apptainer && $CONTAINER_IMAGE != *://* && ! -e $CONTAINER_IMAGE ]]; then
    refuse "CONTAINER_IMAGE=$CONTAINER_IMAGE is not there"
  fi
  [[ -n $dry_run || -n $(command -v sbatch) ]] || refuse "sbatch is not on the PATH: run this on a login node of the cluster, or --dry_run"
  printf '%s\n' "${flags[@]}" | grep -q '^--config=' || [[ -e $WORKDIR/config.json || -e $WORKDIR/shared.json ]] ||
    refuse "$WORKDIR holds no run yet: --config=RECIPE says what a new one is"
}

# submit NAME SCRIPT OPTIONS…
submit() {
  local partition=$PARTITION qos=$QOS more command
  if [[ $1 == searcher ]]; then partition=$SEARCHER_PARTITION qos=$SEARCHER_QOS; fi
  read -r -a more <<<"$SBATCH_MORE"
  local log=%j
  [[ $1 != searcher ]] || log=%A_%a
  # TERM without B: goes to the steps, not to the job's shell, which goes on to queue the job again.
  command=(sbatch "--job-name=$(basename "$WORKDIR")-$1" "--output=$WORKDIR/logs/slurm-$1-$log.log" --open-mode=append \
    --requeue "--signal=TERM@$STOP_SECONDS" --export=ALL ${ACCOUNT:+"--account=$ACCOUNT"} ${partition:+"--partition=$partition"} \
    ${qos:+"--qos=$qos"} ${CONSTRAINT:+"--constraint=$CONSTRAINT"} "${@:3}" "${more[@]}" "$2" "${flags[@]}")
  if [[ -z $dry_run ]]; then
    local said
    said=$("${command[@]}")
    echo "$said ($1)"
    [[ $1 == trainer ]] || echo "${said##* }" >>"$WORKDIR/logs/slurm-joined"
    return
  fi
  echo "${command[*]}"
  PRINT_STEPS=1 SLURM_SUBMIT_DIR=$PWD ROLE=$1 bash "$2" "${flags[@]}"
}

check
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
    ROLE=evaluator submit evaluator launch/slurm_searchers.sh --nodes=1 --ntasks=1 "--cpus-per-task=$EVALUATOR_CPUS" "${asked[@]}" \
      "--time=$TRAINER_TIME"
  fi
fi
if [[ $only != trainer ]] && ((SEARCHERS > 0)); then
  mapfile -t asked < <(gres $((SEARCHERS_PER_NODE * SEARCHER_GPUS)); memory $((SEARCHERS_PER_NODE * SEARCHER_MEMORY)))
  ROLE=searcher submit searcher launch/slurm_searchers.sh "--array=0-$((SEARCHERS / SEARCHERS_PER_NODE - 1))" --nodes=1 --ntasks=1 \
    "--cpus-per-task=$((SEARCHERS_PER_NODE * SEARCHER_CPUS))" "${asked[@]}" "--time=$SEARCHER_TIME"
fi
