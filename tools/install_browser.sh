#!/usr/bin/env bash
# Installs Chromium and its driver for the tests that open a report's page in a real browser; see apt.sh.
set -euo pipefail
# shellcheck source=tools/apt.sh
. "$(dirname "$0")/apt.sh"

ensure browser "browser tests" "chromium chromedriver" chromium chromium-driver
