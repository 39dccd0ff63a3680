#!/usr/bin/env bash
# Install Slurm, without starting it, for the tests that start a cluster of virtual nodes. These tests need root. apt.sh
# has the conditions.
set -euo pipefail
# shellcheck source=tools/apt.sh
. "$(dirname "$0")/apt.sh"

ensure slurm "Slurm's tests" "slurmctld slurmd sbatch munged ip" slurmctld slurmd slurm-client munge iproute2
