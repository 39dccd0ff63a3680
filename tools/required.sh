# shellcheck shell=bash
# Functions for the scripts that install what only some tests need. If an installation is not possible or fails, the
# script prints the reason and exits with 0, and those tests are skipped. If SELECTRON_REQUIRED names the requirement,
# as in CI, the script exits with 1 instead, and those tests would fail.

# go_without REQUIRED TESTS REASON: end the script without the installation.
go_without() {
    echo "install_$1: $3" >&2
    case ",${SELECTRON_REQUIRED:-}," in *",$1,"*) exit 1 ;; esac
    echo "install_$1: $2 are skipped" >&2
    exit 0
}

# ensure REQUIRED TESTS "PROGRAM ..." PACKAGE ...: install the Debian packages unless all programs exist. This needs
# root and apt-get.
ensure() {
    local required=$1 tests=$2 programs=$3 program missing=""
    shift 3
    for program in $programs; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing=$program
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        go_without "$required" "$tests" "$missing is not there, and installing it needs root and apt-get"
    fi
    echo "install_$required: $*"
    _install "$@" || go_without "$required" "$tests" "apt-get failed, see above"
}

_install() {
    local retry=(-o Acquire::Retries=5)  # one failed request to a mirror must not skip tests
    apt-get "${retry[@]}" update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get "${retry[@]}" install -y -qq --no-install-recommends "$@" >/dev/null
}
