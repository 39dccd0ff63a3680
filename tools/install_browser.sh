#!/usr/bin/env bash
# Install Chromium and its driver for the tests that open a report's page in a real browser. required.sh has the
# conditions.
set -euo pipefail
# shellcheck source=tools/required.sh
. "$(dirname "$0")/required.sh"

ensure browser "browser tests" "chromium chromedriver" chromium chromium-driver
