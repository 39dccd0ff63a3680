#!/usr/bin/env bash
# Install Slurm, without starting it, for the tests that start a cluster of virtual nodes. These tests need root.
# required.sh has the conditions.
set -euo pipefail
# shellcheck source=tools/required.sh
. "$(dirname "$0")/required.sh"

ensure slurm "Slurm's tests" "slurmctld slurmd sbatch munged ip" slurmctld slurmd slurm-client munge iproute2
