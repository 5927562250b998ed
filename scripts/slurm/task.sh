#!/usr/bin/env bash
# Turns one task of srun into one rank: sets torch's variables from Slurm's, then replaces this shell by the program, so
# that signals reach it.
set -euo pipefail
export RANK="$SLURM_PROCID"
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE="$((SLURM_NTASKS / SLURM_NNODES))"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
exec "$@"
