#!/usr/bin/env bash
# More searchers for a run, on this machine. They may come at any time, also before the trainer or while it is away, and
# leave when the run has finished. Ctrl-C ends them after the batch in flight; what they wrote stays in the run.
#
#   launch/local.sh COUNT --config=configs/demo.py --workdir=runs/demo [--config.x=y ...]
#
# Give them the flags of the run: what defines its rows is compared with the run's config.json, and a difference is refused.
#
#   CPUS=4-7,12     cores they may use, dealt out in turn; default: all, shared by all of them (Linux only)
#   GPUS=1,2        CUDA devices, dealt out in turn; default: those of CUDA_VISIBLE_DEVICES, or all of the machine
#   GPU_MEMORY=0.4  share of a GPU's memory that each takes; default: 0.9 over the searchers of a GPU
#   PYTHON=python   default: .venv/bin/python
set -euo pipefail

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
count=$1 workdir=
shift
for flag in "$@"; do case $flag in --workdir=*) workdir=${flag#*=} ;; esac; done
[[ -n $workdir ]] || usage

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-$root/.venv/bin/python}
# Transparent huge pages for large buffers: faster decoding on a CPU.
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}

cores=()
for part in $(tr , " " <<<"${CPUS:-}"); do cores+=($(seq "${part%-*}" "${part#*-}")); done
case ${JAX_PLATFORMS:-} in
  cpu* | tpu*) ;;
  *) : "${GPUS=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}}" ;;
esac
IFS=, read -r -a gpus <<<"${GPUS:-}"

deal() { # NUMBER ITEM…: every COUNTth item from NUMBER on, with commas; one of them where there are fewer than searchers
  local number=$1 items=("${@:2}") mine
  mine=${items[number % ${#items[@]}]}
  for ((i = number + count; i < ${#items[@]}; i += count)); do mine+=,${items[i]}; done
  echo "$mine"
}

mkdir -p "$workdir/logs"
pids=() logs=()
# Each searcher in a process group of its own: a Ctrl-C reaches this script alone, which asks them once. Asked twice, they drop
# the batch in flight.
set -m
trap '[[ ${#pids[@]} -eq 0 ]] || kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM
for ((number = 0; number < count; number++)); do
  place=() share=${GPU_MEMORY:-}
  [[ ${#cores[@]} -eq 0 ]] || place=(taskset -c "$(deal "$number" "${cores[@]}")")
  [[ ${#gpus[@]} -eq 0 ]] || share=${share:-$(printf '0.%02d' $((90 / ((count + ${#gpus[@]} - 1) / ${#gpus[@]}))))}
  place+=(env ${share:+-u XLA_PYTHON_CLIENT_MEM_FRACTION "XLA_CLIENT_MEM_FRACTION=$share"})
  [[ ${#gpus[@]} -eq 0 ]] || place+=(CUDA_DEVICE_ORDER=PCI_BUS_ID "CUDA_VISIBLE_DEVICES=$(deal "$number" "${gpus[@]}")")
  logs+=("$workdir/logs/searcher-$(hostname)-$$-$number.log")
  "${place[@]}" "$python" -m tba_jax.run.restart "--workdir=$workdir" "$python" -m tba_jax.main "$@" --role=searcher \
    </dev/null >>"${logs[number]}" 2>&1 &
  pids+=($!)
  echo "searcher ${pids[number]}: ${place[*]}, log ${logs[number]}"
done

failed=0
for ((number = 0; number < count; number++)); do
  # A signal to this script interrupts `wait`, with a code above 128, while the searcher still ends its batch: wait on.
  while wait "${pids[number]}" && code=0 || code=$?; ((code > 128)) && kill -0 "${pids[number]}" 2>/dev/null; do :; done
  wait "${pids[number]}" && code=0 || code=$?
  if ((code)); then
    echo "searcher ${pids[number]} ended with code $code: $(tail -n 1 "${logs[number]}")" >&2
    failed=1
  fi
done
exit "$failed"
