#!/usr/bin/env bash
# Runs srun, and ends with the exit code of the process that ended first by itself.
#
#   launch/slurm_step.sh srun --nodes=2 … python -m tba_jax.main … --role=trainer
#
# The code of srun is the highest of its tasks. Where one process of a trainer ends, the others end with 6 (another process is gone)
# or are killed after --wait seconds: that is higher than the code that tells why. srun prints a line for each task that failed.
set -u
words=$(mktemp)
trap 'rm -f "$words"' EXIT
# A signal waits for srun's end: Slurm has told the tasks already.
trap : TERM INT
exec {copied}> >(exec tee "$words" >&2)
tee=$!
"$@" 2>&"$copied"
code=$?
exec {copied}>&-
wait "$tee"
first=$(sed -n 's/^srun: error: .*: Exited with exit code \([0-9]*\)$/\1/p' "$words" | grep -vx 6 | head -n 1)
exit "${first:-$code}"
