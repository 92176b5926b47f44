#!/usr/bin/env bash
# The bundled pair over K and concurrency, its figures, and the forecast of K = 5 from K = 1 and 3: what docs/measuring.md shows.
#
#   benches/sweep_bundled_pair.sh [FOLDER]     default: benches/results/bundled_pair; run again after an interrupt, it goes on
#
# PROMPTS and OUTPUT_LEN shorten it. The rate is infinite, because the pair answers faster than one request a second for each
# place: at the default rate the server would wait for the client.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-benches/results/bundled_pair}
specrs=.venv/bin/specrs
sweep=$folder/sweep.parquet
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

mkdir -p "$folder"
"$specrs" bench sweep --output "$sweep" --k 0,1,3,5 --max-concurrency 1,4,8 --temperature 0 --ignore-eos --request-rate inf \
  --output-len "${OUTPUT_LEN:-128}" ${PROMPTS:+--num-prompts "$PROMPTS"} --disable-tqdm
"$specrs" bench plot "$sweep" --output-dir "$folder"
"$specrs" forecast --sweep "$sweep" --fit-k 1,3 --json "$folder/forecast.json" | tee "$folder/forecast.txt"
for concurrency in 1 4 8; do
  "$specrs" forecast --sweep "$sweep" --fit-k 1,3 --concurrency "$concurrency" --max-k 7 \
    --plot "$folder/forecast-concurrency-$concurrency.png" | tee -a "$folder/forecast.txt" || true # too noisy for a line
done
