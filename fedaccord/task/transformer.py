"""A small transformer that classifies texts, from token ids; 0 is the padding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS = 64, 4, 2


class Transformer(nn.Module):
    """Pre-norm encoder layers with learned positions; the mean over the tokens is classified.

    Input (n, length) int64 token ids; output (n, outputs). Padding is masked: the scores of a text
    do not depend on its padding. A text without tokens counts as one padding token.
    """

    def __init__(self, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position_embedding = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, outputs)
        for table in (self.embedding, self.position_embedding):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
        is_token = (tokens != 0) | (first & (tokens == 0).all(dim=-1, keepdim=True))
        x = self.embedding(tokens) + self.position_embedding.weight[: tokens.shape[-1]]
        for layer in self.layers:
            x = layer(x, is_token)
        weight = is_token.to(x.dtype)[..., None]
        scores: Tensor = self.head((self.norm(x) * weight).sum(-2) / weight.sum(-2))
        return scores


class Layer(nn.Module):
    """Self-attention, then two linear layers, each after a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_dense = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.view(heads).transpose(-2, -3)
            for part in self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=is_token[..., None, None, :])
        x = x + self.merge(attention.transpose(-2, -3).flatten(-2))
        out: Tensor = x + self.dense(self.norm_dense(x))
        return out
