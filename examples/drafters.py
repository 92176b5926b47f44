"""Generate one text with each drafter, and print how many tokens a step gives.

    python examples/drafters.py [MODEL]

A list of drafters, such as "suffix,draft_model", takes the best one for each request and step. The greedy text is the
same with all of them, and without drafts.
"""

import sys
import time

from specrs import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else None
methods = ["ngram", "suffix", "ngram,suffix"]
if model is None:
    methods += ["draft_model", "eagle3", "suffix,draft_model"]  # the pair has a draft model and a head

prompt = "def add(a, b):\n    return a + b\n\ndef sub(a, b):"
greedy = SamplingParams(temperature=0.0, max_tokens=96)
texts = set()
for method in [None, *methods]:
    drafts = None if method is None else {"method": method, "num_speculative_tokens": 5}
    llm = LLM(model=model, max_num_seqs=1, speculative_config=drafts)
    start = time.perf_counter()
    (output,) = llm.generate(prompt, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    texts.add(output.outputs[0].text)
    count, accepted = output.metrics.num_generated_tokens, output.metrics.accepted_tokens
    speed = f"{count / seconds:7.1f} tokens/s, {count / (count - accepted):.2f} tokens per step"
    print(f"{method or 'no drafts':<20}{speed}")
print("the same text with all of them" if len(texts) == 1 else f"{len(texts)} different texts")
