# shellcheck shell=bash
# Sourced by the scripts that install what some tests need from Debian's packages. It needs root and apt-get: without
# them, or where apt-get fails, it says so and those tests are skipped with the reason; where SELECTRON_REQUIRED names
# what they need, as it does in CI, it fails, and they would.

# ensure REQUIRED TESTS "PROGRAM ..." PACKAGE ...: install the packages unless all programs are there.
ensure() {
    local required=$1 tests=$2 programs=$3 program missing=""
    shift 3
    for program in $programs; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing=$program
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        _without "$required" "$tests" "$missing is not there, and installing it needs root and apt-get"
    fi
    echo "install_$required: $*"
    _install "$@" || _without "$required" "$tests" "apt-get failed, see above"
}

_without() {
    echo "install_$1: $3" >&2
    case ",${SELECTRON_REQUIRED:-}," in *",$1,"*) exit 1 ;; esac
    echo "install_$1: $2 are skipped" >&2
    exit 0
}

_install() {
    local retry=(-o Acquire::Retries=5)  # a mirror that does not answer once is no reason to leave tests out
    apt-get "${retry[@]}" update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get "${retry[@]}" install -y -qq --no-install-recommends "$@" >/dev/null
}
