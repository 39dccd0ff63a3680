#!/usr/bin/env bash
# Installs Slurm for the tests that start a cluster of virtual nodes; nothing of it is started. They need root; see apt.sh.
set -euo pipefail
# shellcheck source=tools/apt.sh
. "$(dirname "$0")/apt.sh"

ensure slurm "Slurm's tests" "slurmctld slurmd sbatch munged ip" slurmctld slurmd slurm-client munge iproute2
