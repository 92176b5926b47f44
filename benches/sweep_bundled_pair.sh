#!/usr/bin/env bash
# The bundled pair over K and concurrency, its figures, and the forecast of K = 5 from K = 1 and 3: what docs/benchmarks.md
# shows.
#
#   benches/sweep_bundled_pair.sh [FOLDER [PICTURES]]     default: benches/results/bundled_pair, docs/measuring
#
# Run again after an interrupt, it goes on. PROMPTS, OUTPUT_LEN and RUNS (3) shorten it. The rate is infinite: the pair
# answers faster than one request a second for each place, so that at the default rate it would wait for the client.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-benches/results/bundled_pair}
pictures=${2:-docs/measuring}
specrs=.venv/bin/specrs
sweep=$folder/sweep.parquet
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

mkdir -p "$folder" "$pictures"
"$specrs" bench sweep --output "$sweep" --k 0,1,3,5 --max-concurrency 1,4,8 --temperature 0 --ignore-eos \
  --request-rate inf --num-runs "${RUNS:-3}" --output-len "${OUTPUT_LEN:-128}" ${PROMPTS:+--num-prompts "$PROMPTS"} --disable-tqdm
"$specrs" bench plot "$sweep" --output-dir "$pictures"
"$specrs" forecast --sweep "$sweep" --fit-k 1,3 --json "$folder/forecast.json" | tee "$folder/forecast.txt"
for concurrency in 1 4 8; do
  "$specrs" forecast --sweep "$sweep" --fit-k 1,3 --concurrency "$concurrency" --max-k 7 \
    --plot "$pictures/forecast-concurrency-$concurrency.png" | tee -a "$folder/forecast.txt" || true # too noisy for a line
done

# The rows as the page has them.
.venv/bin/python - "$sweep" <<'PYTHON' | tee "$folder/table.md"
import sys
from pathlib import Path

from specrs.bench.results import read
from specrs.forecast import series

(item,) = series(read(Path(sys.argv[1])))
plain = item.vanilla
rows = [*plain.values(), *(row for by_k in item.rows.values() for row in by_k.values())]
print("| concurrency | K | tokens/s | speed-up | mean TTFT (ms) | mean TPOT (ms) | mean ITL (ms) | acceptance length |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for row in sorted(rows, key=lambda row: (row.concurrency, row.num_spec_toks)):
    speedup = row.output_token_throughput / plain[row.concurrency].output_token_throughput
    length = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
    cells = [f"{row.output_token_throughput:.0f}", f"{speedup:.2f}", f"{row.mean_ttft:.1f}", f"{row.mean_tpot:.2f}"]
    print(f"| {row.concurrency} | {row.num_spec_toks} | " + " | ".join(cells) + f" | {row.mean_itl:.2f} | {length} |")
PYTHON
