"""guidellm: completions and chats at a concurrency; no request fails."""

import json
from pathlib import Path

import pytest
from specrs.pair import TARGET

from .conftest import Client


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(base_url: str, client: Client, tmp_path: Path, endpoint: str) -> None:
    client(
        *("guidellm", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={base_url},model=pair,request_format={endpoint}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12"),
        *("--tokenizer", f"kind=huggingface_auto,model={TARGET}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
        *("--output", "kind=json,path=report.json"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (12, 0, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16
