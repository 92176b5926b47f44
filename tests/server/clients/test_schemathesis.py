"""schemathesis: requests generated from the server's own OpenAPI document, valid and invalid.

Not among its checks: that every request which fits the document is served. Ids beyond the vocabulary, prompts beyond
the context and the like fit, and are refused with 400.
"""

from server.harness import serving

from .conftest import Client


def test_schemathesis(client: Client) -> None:
    # a short context, so that no request takes long
    with serving("--max-model-len", "48", "--max-num-seqs", "16", "--disable-uvicorn-access-log") as server:
        client(
            *("schemathesis", "schemathesis", "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--max-examples", "12", "--exclude-checks", "positive_data_acceptance", "--seed", "1"),
            *(
                "--phases",
                "examples,coverage,fuzzing",
                "--continue-on-failure",
                "--max-time",
                "60",
                "--request-timeout",
                "60",
            ),
        )
        assert server.process.poll() is None
        server.wait_until_idle()
