#!/usr/bin/env bash
# The study in small: prepares the embedded corpus, trains three architectures on it with two processes and compares
# them at equal training loss. `make demo` calls this. A second call goes on where the first one stopped: prepared data
# and finished runs are kept, a run that was stopped continues. `make clean-demo` removes everything.
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

# The command as it could be typed: words with a special character in quotes.
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
    # Asked to stop, training writes its checkpoint and ends with 75; what follows is not wanted then.
    if [ -n "$stopped" ] || [ "$code" = 75 ]; then
        echo "stopped; make demo goes on from here"
        [ -z "$stopped" ] || code=130
    fi
    [ "$code" = 0 ] || exit "$code"
}

stopped=
trap 'stopped=yes' INT TERM

# Two processes need two GPUs, or none.
if command -v nvidia-smi >/dev/null && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
    export CUDA_VISIBLE_DEVICES=
fi

heading "preparing the embedded corpus"
if [ -e "$runs/data/manifest.json" ]; then
    echo "$runs/data is there and kept"
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
