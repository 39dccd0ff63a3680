#!/usr/bin/env bash
# Installs Slurm for the tests that start a cluster of virtual nodes; nothing of it is started. They need root, and so
# does this: without it, or where apt-get is not there or fails, it says so and those tests are skipped with the reason;
# where SELECTRON_REQUIRED names slurm, as it does in CI, it fails, and they would.
set -euo pipefail

without() {
    echo "install_slurm: $1" >&2
    case ",${SELECTRON_REQUIRED:-}," in *,slurm,*) exit 1 ;; esac
    echo "install_slurm: Slurm's tests are skipped" >&2
    exit 0
}

for tool in slurmctld slurmd sbatch munged ip; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || missing=$tool
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    without "$missing is not there, and installing it needs root and apt-get"
fi
echo "install_slurm: slurmctld slurmd slurm-client munge iproute2"
install() {
    local retry=(-o Acquire::Retries=5)  # a mirror that does not answer once is no reason to leave tests out
    apt-get "${retry[@]}" update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get "${retry[@]}" install -y -qq --no-install-recommends "$@" >/dev/null
}
install slurmctld slurmd slurm-client munge iproute2 || without "apt-get failed, see above"
