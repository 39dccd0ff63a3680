#!/usr/bin/env bash
# Install Weights & Biases, MLflow and Trackio in .venv/loggers for the tests of their loggers. They are not installed
# in .venv itself: DeepSpeed imports wandb and mlflow wherever they are installed, which takes seconds in every process.
# Run `make install` first. required.sh says what happens if the installation fails.
set -euo pipefail
# shellcheck source=tools/required.sh
. "$(dirname "$0")/required.sh"
cd "$(dirname "$0")/.."

python=.venv/bin/python
constraints=.venv/constraints.txt
folder=.venv/loggers

# The three packages, and what they import to log values offline that .venv does not have. Their other dependencies (web
# servers, clients of clouds) would take several times as long.
packages=(
    wandb opentelemetry-api
    mlflow-skinny sqlalchemy alembic cachetools cffi cryptography databricks-sdk fastapi importlib_metadata mako
    opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions sqlparse starlette zipp
    trackio gradio-client httpx python-multipart uvicorn
)

[ -x "$python" ] || go_without loggers "tests of loggers" "there is no .venv; run make install first"
if [ "$folder/.installed" -nt "$constraints" ] && [ "$folder/.installed" -nt tools/install_loggers.sh ]; then
    exit 0
fi
echo "install_loggers: ${packages[*]}"
rm -rf "$folder"
# No bytecode: most of the modules are never imported.
"$python" -m pip install --quiet --quiet --no-deps --no-compile --target "$folder" -c "$constraints" "${packages[@]}" ||
    go_without loggers "tests of loggers" "pip failed, see above"
touch "$folder/.installed"
