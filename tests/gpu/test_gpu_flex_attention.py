"""FlexAttention on a GPU, compiled: values and gradients of packs with shared prefixes."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_process import needs_gpus

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

from slimerl.training.flex_attention import NO_PARENT, flex_attention_over_pack

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


@pytest.mark.parametrize("lengths", [[300, 40, 170, 9], [5, 3, 2, 1]])
def test_compiled_attention_over_shared_prefixes_gives_values_and_gradients_of_a_masked_softmax(
    lengths: list[int],
) -> None:
    from test_flex_attention import brute_force, described, sees

    torch.manual_seed(0)
    parents = [NO_PARENT, 0, 0, 1]
    segment, position, parent = described(parents, lengths)
    tokens = len(segment)
    rows = (segment.tolist(), position.tolist(), parents)
    seen = torch.tensor([[sees(q, k, *rows) for k in range(tokens)] for q in range(tokens)]).cuda()
    query = torch.randn(tokens, 4, 64, device="cuda", requires_grad=True)
    key = torch.randn(tokens, 2, 64, device="cuda", requires_grad=True)
    value = torch.randn(tokens, 2, 64, device="cuda", requires_grad=True)
    of_pack = [x.cuda() for x in (segment, position, segment, position, parent)]
    out = flex_attention_over_pack(query, key, value, *of_pack)
    expected = brute_force(query, key, value, seen)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)  # the kernel multiplies in TF32
    towards = torch.randn_like(out)
    found = torch.autograd.grad((out * towards).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * towards).sum(), (query, key, value))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
