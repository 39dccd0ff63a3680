#!/usr/bin/env bash
# Installs Slurm for the tests that start a cluster of virtual nodes; nothing of it is started. They need root, and so
# does this: without it, or where apt-get is not there or fails, it says so and those tests are skipped with the reason.
set -euo pipefail

for tool in slurmctld slurmd sbatch munged ip; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || missing=$tool
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install_slurm: $missing is not there, and installing it needs root and apt-get: Slurm's tests are skipped" >&2
    exit 0
fi
echo "install_slurm: slurmctld slurmd slurm-client munge iproute2"
install() {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
if ! install slurmctld slurmd slurm-client munge iproute2; then
    echo "install_slurm: apt-get failed, see above: Slurm's tests are skipped" >&2
fi
