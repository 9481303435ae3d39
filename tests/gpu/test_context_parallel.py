"""The context-parallel provider on the device: answers, broken promises, replayed graphs.

A promise that breaks stops the device's context for good, so each is broken in a child process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from cudnn_frost.context_parallel import ForwardProvider
from tests.unit.cp_ranks import Case, expected
from tests.unit.test_context_parallel import BROKEN, Call

LENGTHS = (500, 0, 1000, 1)
CASE = Case("", LENGTHS, False, True, (8, 2), (128, 128))
REPORTED = 7


def on_device(case: Case = CASE) -> Call:
    """A call whose operands are on the GPU."""
    call = Call(case)
    call.q, call.k, call.v, call.cu = (x.cuda() for x in (call.q, call.k, call.v, call.cu))
    return call


def run(call: Call, provider: ForwardProvider, **changes: Any) -> Any:
    most = max(call.case.lengths)
    return call.run(provider, **{"max_seqlen_q": most, "max_seqlen_kv": most, **changes})


def check(found: tuple[torch.Tensor, torch.Tensor], case: Case) -> None:
    wanted = expected(case)
    torch.testing.assert_close(found[0].cpu().double(), wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1].cpu().double(), wanted[1], atol=1e-4, rtol=1e-4)


def test_forward_is_attention_and_its_stats():
    provider, call = ForwardProvider("fallback"), on_device()
    for _ in range(3):
        check(run(call, provider), CASE)


def test_it_runs_on_the_callers_stream():
    provider, call = ForwardProvider("fallback"), on_device()
    run(call, provider)
    stream = torch.cuda.Stream()
    kept, call.q = call.q, torch.zeros_like(call.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        call.q.copy_(kept)
        found = run(call, provider)
    stream.synchronize()
    check(found, CASE)


def break_promise(name: str, replayed: bool) -> None:
    """In a child: exits with REPORTED when the device said so, 0 when nothing did. An empty name
    breaks none."""
    # the promises that BROKEN breaks are those of its own small case
    call, provider = on_device(Call().case), ForwardProvider("fallback")
    changes = {
        key: {n: x.cuda() for n, x in value.items()} if isinstance(value, dict) else value
        for key, value in BROKEN.get(name, {}).items()
    }
    changes = {k: x.cuda() if torch.is_tensor(x) else x for k, x in changes.items()}
    try:
        if replayed:
            cu_q, cu_kv = call.cu.clone(), call.cu.clone()
            lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
            run(call, provider, **lengths)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run(call, provider, **lengths)
            for key, broken in changes.items():
                lengths[key].copy_(broken)
            captured.replay()
        else:
            call.run(provider, **changes)
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "device-side assert" not in str(error):
            raise
        sys.exit(REPORTED)


def child(name: str, replayed: bool) -> int:
    code = f"from {__name__} import break_promise; break_promise({name!r}, {replayed})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


@pytest.mark.parametrize("replayed", [False, True])
def test_kept_promises_do_not(replayed):
    assert child("", replayed) == 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_stops_the_device(name):
    assert child(name, replayed=False) == REPORTED


@pytest.mark.parametrize(
    "name", [name for name, changes in BROKEN.items() if set(changes) & {"cu_seqlens_q"}]
)
def test_a_promise_that_a_replay_breaks_stops_the_device(name):
    assert child(name, replayed=True) == REPORTED
