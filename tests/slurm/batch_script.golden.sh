#!/bin/bash
# Sessions of the run ink-unet3d. Written by `kgorch slurm submit`, which overwrites it.
#SBATCH --job-name=kgorch-ink-unet3d-012345
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=0-09:00:00
#SBATCH --signal=B:USR1@102
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH '--output=/shared/my kgorch/runs/ink-unet3d/1/slurm/%j.log'
#SBATCH --partition=gpu
#SBATCH -A vesuvius
#SBATCH --cpus-per-task 32
#SBATCH '--comment=it'"'"'s a # b'

# Slurm's warning before the time limit (USR1) and `kgorch stop` (USR2) are ignored until the session listens.
trap '' USR1 USR2
export KGORCH_HOME='/shared/my kgorch'
cd /shared/plans/ink || exit 2
exec /shared/venv/bin/python -m kgorch.cli slurm session ink-unet3d
