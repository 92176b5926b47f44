"""`specrs tune` where there is nothing to time: what it says."""

import pytest
import torch
from specrs.cli import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to tune for")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "anything"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrs tune: error: device='cuda': specrs tune times kernels on a CUDA device")
    assert error.count("\n") == 1


def test_checks_rows_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--model", "anything", "--rows", "65"]) == 2
    assert "rows=65: must be an integer from 1 to 64" in capsys.readouterr().err


def test_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tune"])
    assert end.value.code == 2
    assert "--model" in capsys.readouterr().err
