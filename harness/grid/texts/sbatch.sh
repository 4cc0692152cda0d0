#!/bin/bash
# @COUNT@ units, a whole node each; a node that dies is replaced by Slurm (--requeue).
# Submit: sbatch THIS_FILE      See: dpbench grid status @GRID@      Then: dpbench grid merge @GRID@
#SBATCH --job-name=dpbench
#SBATCH --array=0-@LAST@
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --time=12:00:00
#SBATCH --open-mode=append
#SBATCH --output=@GRID@/%A_%a.log
exec @PYTHON@ -P -m harness grid unit @GRID@ "$SLURM_ARRAY_TASK_ID"
