#!/usr/bin/env bash
# Installs Chromium and its driver for the tests that open a report's page in a real browser. It needs root and apt-get:
# without them, or where apt-get fails, it says so and those tests are skipped with the reason; where SELECTRON_REQUIRED
# names browser, as it does in CI, it fails, and they would.
set -euo pipefail

without() {
    echo "install_browser: $1" >&2
    case ",${SELECTRON_REQUIRED:-}," in *,browser,*) exit 1 ;; esac
    echo "install_browser: browser tests are skipped" >&2
    exit 0
}

for tool in chromium chromedriver; do
    command -v "$tool" >/dev/null || missing=$tool
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    without "$missing is not there, and installing it needs root and apt-get"
fi
echo "install_browser: chromium chromium-driver"
install() {
    local retry=(-o Acquire::Retries=5)  # a mirror that does not answer once is no reason to leave tests out
    apt-get "${retry[@]}" update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get "${retry[@]}" install -y -qq --no-install-recommends "$@" >/dev/null
}
install chromium chromium-driver || without "apt-get failed, see above"
