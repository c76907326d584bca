#!/usr/bin/env bash
#SBATCH --job-name=gpt-small
#SBATCH --gres=gpu:1
#SBATCH --time=8:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300

# Saves five minutes before the time limit, and queues again: sbatch examples/cluster/slurm.sh
exec scripts/resume.sh --grace-s 280 --store /shared/checkpoints --run gpt-small -- python train.py
