"""The tiny hybrid model in plain PyTorch, for training: Gemma3's text model, with its parameter names.

Its forward pass takes what a training step needs: prompts, several chains after each prompt that do not see each other,
and for every attention head and chain word whether it sees its own prompt's KV or another's. A head that sees another
prompt's KV cannot do another head's look-up for it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy.puzzles import FULL


@dataclass(frozen=True)
class Shape:
    """Sizes; the defaults are the committed model's."""

    layer_types: tuple[str, ...]
    vocabulary_size: int
    window: int
    num_kv_heads: int = 2
    num_query_heads: int = 4
    head_size: int = 64
    hidden_size: int = 128
    mlp_size: int = 256
    query_scalar: int = 16
    local_theta: float = 1e4
    global_theta: float = 1e6
    max_tokens: int = 8192

    @property
    def group_size(self) -> int:
        """Query heads for one KV head."""
        return self.num_query_heads // self.num_kv_heads


class Norm(nn.Module):
    """RMS norm whose weight is an offset from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.rms_norm(x, x.shape[-1:], 1 + self.weight, 1e-6)


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As Gemma does."""
        hidden: Tensor = functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        return self.down_proj(hidden)


def rotation(theta: float, head_size: int, num_positions: int) -> Tensor:
    """Cosines and sines, [2, position, head_size]."""
    frequencies = theta ** (-torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary position embedding of x [.., token, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


@dataclass(frozen=True)
class Places:
    """Where the tokens of one batch stand: ``num_prompt`` prompt tokens, then the words of all chains, one by one."""

    num_prompt: int
    positions: Tensor
    chain_mask: Tensor
    """[chain word, chain word]: whether one sees the other."""
    is_near: Tensor
    """[chain word, prompt token]: whether the prompt token is inside the word's window."""

    @classmethod
    def of(cls, num_prompt: int, num_chains: int, num_words: int, window: int) -> "Places":
        """All chains begin right after the prompt."""
        words = num_prompt + torch.arange(num_words).repeat(num_chains)
        chain = torch.arange(num_chains).repeat_interleave(num_words)
        sees = (chain[:, None] == chain[None]) & (words[:, None] >= words[None])
        prompt = torch.arange(num_prompt)
        return cls(num_prompt, torch.cat((prompt, words)), sees, words[:, None] - prompt[None] < window)


class Attention(nn.Module):
    """Grouped-query attention, full or in a sliding window."""

    def __init__(self, shape: Shape, is_full: bool) -> None:
        super().__init__()
        self.shape = shape
        self.is_full = is_full
        width, kv_width = shape.num_query_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(shape.head_size), Norm(shape.head_size)

    def forward(self, x: Tensor, places: Places, turn: Tensor, own: Tensor | None) -> Tensor:
        """Attention over all tokens; ``own`` as in ``TinyHybrid.forward``."""
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), turn)
        key = self._for_queries(rotate(self.k_norm(self._heads(self.k_proj(x))), turn))
        value = self._for_queries(self._heads(self.v_proj(x)))
        n = places.num_prompt
        prompt = self._prompt(query[:, :, :n], key[:, :, :n], value[:, :, :n])
        found = torch.cat((prompt, self._chains(query, key, value, places, own)), 2)
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)

    def _for_queries(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.shape.group_size, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.shape.query_scalar**-0.5
        )

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The prompt's own tokens. A sliding layer goes in pieces of one window, each of which sees the one before."""
        num_tokens, window = query.shape[2], self.shape.window
        if self.is_full:
            scale = self.shape.query_scalar**-0.5
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        padding = -num_tokens % window
        pieces = [functional.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, window)) for x in (query, key, value)]
        with_previous = [torch.cat((functional.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), 3) for x in pieces[1:]]
        row, column = torch.arange(window)[:, None], torch.arange(2 * window)[None] - window
        mask = ((column <= row) & (row - column < window)).repeat(pieces[0].shape[2], 1, 1)
        mask[0, :, :window] = False
        return self._attend(pieces[0], *with_previous, mask).flatten(2, 3)[:, :, :num_tokens]

    def _chains(self, query: Tensor, key: Tensor, value: Tensor, places: Places, own: Tensor | None) -> Tensor:
        """The chains' words, each chain by itself after its prompt, or after the next sample's prompt."""
        n = places.num_prompt
        first = 0 if self.is_full else max(0, n - self.shape.window + 1)
        visible = torch.ones_like(places.is_near) if self.is_full else places.is_near
        mask = torch.cat((visible[:, first:], places.chain_mask), 1)

        def after(prompt_key: Tensor, prompt_value: Tensor) -> Tensor:
            keys, values = torch.cat((prompt_key, key[:, :, n:]), 2), torch.cat((prompt_value, value[:, :, n:]), 2)
            return self._attend(query[:, :, n:], keys, values, mask)

        prompt_key, prompt_value = key[:, :, first:n], value[:, :, first:n]
        found = after(prompt_key, prompt_value)
        if own is None:
            return found
        foreign = after(prompt_key.roll(1, 0), prompt_value.roll(1, 0))
        return torch.where(self._for_queries(own)[..., None], found, foreign)


class Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, shape: Shape, is_full: bool) -> None:
        super().__init__()
        self.self_attn = Attention(shape, is_full)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.pre_feedforward_layernorm = Norm(shape.hidden_size)
        self.post_feedforward_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, places: Places, turn: Tensor, own: Tensor | None) -> Tensor:
        """As Gemma does."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), places, turn, own))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class TinyHybrid(nn.Module):
    """The model; its state has Gemma3TextModel's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, kind == FULL) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden_size)
        for name, theta in (("local_turn", shape.local_theta), ("global_turn", shape.global_theta)):
            self.register_buffer(name, rotation(theta, shape.head_size, 4096), persistent=False)

    def forward(self, prompts: Tensor, chains: Tensor, own: Tensor | None = None) -> Tensor:
        """Logits after every chain word.

        prompts [sample, token], chains [sample, chain, word], own [layer, sample, KV head, chain * word]: True where
        the head sees the sample's own prompt, False where it sees another sample's. Answers
        [sample, chain, word, id].
        """
        num_prompt, (num_chains, num_words) = prompts.shape[1], chains.shape[1:]
        places = Places.of(num_prompt, num_chains, num_words, self.shape.window)
        x = self.embed_tokens(torch.cat((prompts, chains.flatten(1)), 1)) * math.sqrt(self.shape.hidden_size)
        for number, layer in enumerate(self.layers):
            turn = self.global_turn if layer.self_attn.is_full else self.local_turn
            x = layer(x, places, turn[:, places.positions], None if own is None else own[number])
        words = self.norm(x[:, num_prompt:]).unflatten(1, (num_chains, num_words))
        return functional.linear(words, self.embed_tokens.weight)
