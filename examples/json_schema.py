"""An answer that follows a JSON schema, with any model.

python examples/json_schema.py [MODEL]
"""

import json
import sys

from specrs import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=1)
# small models fill a token limit with blanks where JSON allows them
structure = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=structure)
(output,) = llm.generate("# What the code below is, as JSON:\nclass Stack: ...\n", params, use_tqdm=False)
print(json.dumps(json.loads(output.outputs[0].text), indent=2))
