#!/usr/bin/env bash
# One task of srun becomes one rank: Slurm's names of who it is, told under torch's names; then the program itself, so
# that signals reach it and no shell in between.
set -euo pipefail
export RANK="$SLURM_PROCID"
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE="$((SLURM_NTASKS / SLURM_NNODES))"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
exec "$@"
