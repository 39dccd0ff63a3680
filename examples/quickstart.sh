#!/usr/bin/env bash
# A small version of the study: prepare the embedded corpus, train three architectures on it with two processes and
# compare them at equal training loss. `make demo` calls this script. A second call resumes where the first one stopped:
# it keeps prepared data and finished runs, and resumes a stopped run. `make clean-demo` removes everything.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

runs=runs/quickstart
mixers=(attention top1_chunk gated_deltanet) # attention: the Transformer++ of the study
stage=0
stages=$((${#mixers[@]} + 2))

heading() {
    stage=$((stage + 1))
    printf '\n[%d/%d] %s\n' "$stage" "$stages" "$*"
}

# Print the command as one would type it, with quotes around words that contain special characters.
show() {
    local word line='$'
    for word in "$@"; do
        case $word in
        *[!A-Za-z0-9_./=,:-]*) line+=" '$word'" ;;
        *) line+=" $word" ;;
        esac
    done
    echo "$line"
}

run() {
    show "$@"
    local code=0
    "$@" || code=$?
    # When training is stopped it writes a checkpoint and exits with 75. The following steps must not run then.
    if [ -n "$stopped" ] || [ "$code" = 75 ]; then
        echo "stopped; make demo continues from here"
        [ -z "$stopped" ] || code=130
    fi
    [ "$code" = 0 ] || exit "$code"
}

stopped=
trap 'stopped=yes' INT TERM

# Two processes need two GPUs. With one GPU, train on the CPU.
if command -v nvidia-smi >/dev/null && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
    export CUDA_VISIBLE_DEVICES=
fi

heading "preparing the embedded corpus"
if [ -e "$runs/data/manifest.json" ]; then
    echo "$runs/data exists and is kept"
else
    run selectron prepare --input embedded --output "$runs/data"
fi

for mixer in "${mixers[@]}"; do
    heading "training $mixer"
    run selectron train examples/quickstart.yaml --processes 2 "model.pattern=$mixer*4" "run.name=$mixer" --resume=auto
done

heading "comparing at equal training loss"
run selectron report "${mixers[@]/#/$runs/}" --output "$runs/report"

echo
echo "open $runs/report/index.html (done in $((SECONDS / 60)) min $((SECONDS % 60)) s)"
