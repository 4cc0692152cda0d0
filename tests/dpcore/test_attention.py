"""Attention in all its forms, and transformers, against float64 micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpcore
from dpcore import clipped_sum
from tests.dpcore.comparison import check, check_by_autograd, check_private, has_rules, labels, odd_loss

DTYPES = [torch.float64, torch.float32]


class Attention(nn.Module):
    """x [B, T + S, 3]: queries from the first T positions, keys and values from the others, all through linear layers.

    ``sources``: "self", "memory" (key is value) or "all" different. The attention weights belong to the output.
    """

    def __init__(self, layer, sources="all", mask=None, padding=False, need_weights=True, average=True, queries=3):
        super().__init__()
        self.layer = layer
        self.sources, self.mask, self.padding = sources, mask, padding
        self.options = {"need_weights": need_weights, "average_attn_weights": average}
        self.queries = queries
        self.to_query = nn.Linear(3, layer.embed_dim)
        self.to_key = nn.Linear(3, layer.kdim)
        self.to_value = nn.Linear(3, layer.vdim)
        # Ones and zeros would hide a wrong rule.
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, x):
        query = self.to_query(x[:, : self.queries])
        memory = x[:, self.queries :].tanh()
        key = value = query
        if self.sources != "self":
            key = value = self.to_key(memory)
        if self.sources == "all":
            value = self.to_value(memory)
        batch, steps, positions = len(x), query.shape[1], key.shape[1]
        masks = {}
        if self.mask is not None:
            # Every query sees the first key, otherwise its weights are not numbers.
            hidden = torch.arange(positions) > torch.arange(steps).view(-1, 1)
            if self.mask == "per head":
                hidden = hidden.expand(batch * self.layer.num_heads, -1, -1)
            float_mask = hidden.to(x.dtype) * -1.3
            masks["attn_mask"] = float_mask if self.mask == "float" else hidden
        if self.padding:
            masks["key_padding_mask"] = (torch.arange(positions) == positions - 1).expand(batch, -1) & (positions > 1)
            if self.mask == "float":
                masks["key_padding_mask"] = torch.zeros(batch, positions, dtype=x.dtype).masked_fill(
                    masks["key_padding_mask"], -torch.inf
                )
        if not self.layer.batch_first:
            same = key is value, query is key
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            value = key if same[0] else value
            key, value = (query, query) if same[1] else (key, value)
        out, weights = self.layer(query, key, value, **masks, **self.options)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        return out if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    queries=st.integers(1, 4),
    keys=st.integers(1, 4),
    sources=st.sampled_from(["self", "memory", "all"]),
    dims=st.sampled_from([(None, None), (3, None), (3, 5)]),
    mask=st.sampled_from([None, "bool", "float", "per head"]),
    padding=st.booleans(),
    weights=st.sampled_from([(True, True), (True, False), (False, True)]),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero=st.booleans(),
    batch_first=st.booleans(),
)
def test_every_form(
    dtype, batch, queries, keys, sources, dims, mask, padding, weights, bias, bias_kv, zero, batch_first
):
    torch.manual_seed(0)
    kdim, vdim = dims if sources == "all" else (None, None)
    layer = nn.MultiheadAttention(4, 2, 0.0, bias, bias_kv, zero, kdim, vdim, batch_first)
    model = Attention(layer, sources, mask, padding, *weights, queries=queries).to(dtype)
    x = torch.randn(batch, queries + keys, 3, dtype=dtype)
    check(model, x, labels(batch), clipped_sum)
    assert has_rules(model, x, labels(batch))


@pytest.mark.parametrize("sources", ["self", "memory", "all"])
def test_frozen_parts(sources):
    torch.manual_seed(0)
    x, y = torch.randn(4, 7, 3, dtype=torch.float64), labels(4)
    for kdim in (None, 3):
        names = ["in_proj_bias", "out_proj.weight", "bias_k"] + ([] if kdim else ["in_proj_weight"])
        for name in names if kdim is None or sources == "all" else ():
            layer = nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=kdim, batch_first=True)
            layer.get_parameter(name).requires_grad_(False)
            check(Attention(layer, sources).double(), x, y, clipped_sum)


@pytest.mark.parametrize("sources", ["self", "memory", "all"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_draws_what_torch_draws(sources, batch_first):
    torch.manual_seed(0)
    for need_weights in (True, False):
        layer = nn.MultiheadAttention(4, 2, 0.4, add_bias_kv=True, batch_first=batch_first)
        model = Attention(layer, sources, need_weights=need_weights).double()
        check_by_autograd(model, torch.randn(4, 7, 3, dtype=torch.float64), labels(4))


@pytest.mark.parametrize("sources", ["self", "memory", "all"])
def test_the_two_line_use(sources):
    torch.manual_seed(0)
    for batch_first in (True, False):
        layer = nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=batch_first)
        check_private(Attention(layer, sources).double(), torch.randn(4, 7, 3, dtype=torch.float64), labels(4))


def test_examples_that_attend_to_each_other_are_refused():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.layer(x, x, x)[0]

    with pytest.raises(dpcore.UnsupportedError, match="attend to each other"):
        clipped_sum(Swapped(), odd_loss, torch.randn(3, 5, 4), labels(3), 1.0)


class Transformer(nn.Module):
    """x [B, T, 4]: the encoder's input is all of it, the decoder's half, causal."""

    def __init__(self, batch_first, norm_first, dropout):
        super().__init__()
        self.inner = nn.Transformer(4, 2, 2, 2, 8, dropout, batch_first=batch_first, norm_first=norm_first)

    def forward(self, x):
        source, target = x, x[:, : x.shape[1] // 2].cos()
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=x.dtype)
        if self.inner.batch_first:
            return self.inner(source, target, tgt_mask=causal)
        return self.inner(source.transpose(0, 1), target.transpose(0, 1), tgt_mask=causal).transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer(batch_first, norm_first):
    torch.manual_seed(0)
    for batch in (3, 6):
        x, y = torch.randn(batch, 6, 4, dtype=torch.float64), labels(batch)
        model = Transformer(batch_first, norm_first, 0.0).double()
        check(model, x, y, clipped_sum)
        assert has_rules(model, x, y)
        check_by_autograd(Transformer(batch_first, norm_first, 0.2).double(), x, y)
        check_private(Transformer(batch_first, norm_first, 0.0).double(), x, y)


class LearnedQueries(nn.Module):
    """A class token, learned queries and a table of positions, each handed to every example."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.table = nn.Parameter(torch.randn(1, 6, 4))
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        batch = len(x)
        if self.how == "expand":
            token, queries = self.token.expand(batch, -1, -1), self.queries.expand(batch, 2, 4)
            table = self.table.expand_as(torch.empty(batch, 6, 4))
        else:
            token, queries = self.token.repeat(batch, 1, 1), self.queries.repeat(batch, 1, 1)
            table = torch.broadcast_to(self.table, (batch, 6, 4))
        x = torch.cat([token, x], 1) + table
        return self.layer(queries, x, x, need_weights=False)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["expand", "repeat"])
def test_parameters_handed_to_every_example(dtype, how):
    torch.manual_seed(0)
    for batch in (2, 3, 4, 6):
        model = LearnedQueries(how).to(dtype)
        x = torch.randn(batch, 5, 4, dtype=dtype)
        check(model, x, labels(batch), clipped_sum)
        assert has_rules(model, x, labels(batch))
