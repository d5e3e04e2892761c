#!/bin/bash
# A run of Puna as a Slurm job, from a folder that all nodes see, with Puna's environment active:
#   sbatch deploy/slurm.sh run curate --recipe clean --input crawl/
# With `--ntasks N` the parts are computed by N Dask workers of `--cpus-per-task` processes each.
#SBATCH --job-name=puna
#SBATCH --cpus-per-task=16
#SBATCH --open-mode=append
# Ctrl-C a minute before the time limit: what is finished is kept, and the same command goes on from it.
#SBATCH --signal=B:INT@60
#SBATCH --requeue
set -eu
if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then
  address=$(hostname):$((20000 + SLURM_JOB_ID % 10000))
  # A stage starts processes of its own, which Dask forbids its workers by default.
  export DASK_DISTRIBUTED__WORKER__DAEMON=False DASK_LOGGING__DISTRIBUTED=warning
  dask scheduler --port "${address##*:}" --no-dashboard &
  srun dask worker "tcp://$address" --nworkers "${SLURM_CPUS_PER_TASK:-1}" --nthreads 1 --no-dashboard &
  for _ in $(seq 60); do (: > "/dev/tcp/${address/://}") 2>/dev/null && break; sleep 1; done
  set -- "$@" --executor "dask://$address"
fi
exec puna "$@"
