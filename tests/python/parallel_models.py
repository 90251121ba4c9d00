"""Two language models that tests cut in every way people cut theirs; few numbers divide the sizes.

`transformer` is dense. `moonlight` has Moonlight's parts, small: latent attention, one dense layer,
then experts with shared ones beside them.
"""

import torch
from habits import WORDS
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.nn import functional

WIDTH, INNER, HEADS = 24, 39, 6
EXPERTS, CHOSEN, EXPERT_INNER = 6, 2, 11
NOPE, ROPE, VALUE, RANK = 5, 3, 7, 10


def linear(*sizes):
    return nn.Linear(*sizes, bias=False)


def attend(q, k, v):
    """Of every position to every one; tensors have (batch, position, head, width)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    context = None  # the group of ranks that have the other parts of the sequence

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.context is not None:
            k, v = (all_gather_tensor_autograd(part, 1, self.context) for part in (k, v))
        return self.o(attend(*(part.unflatten(-1, (-1, WIDTH // HEADS)) for part in (q, k, v))))


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, inner), linear(inner, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(torch.relu(self.up(self.mlp_norm(x))))


class LatentAttention(nn.Module):
    def __init__(self, heads=3):
        super().__init__()
        self.q_proj = linear(WIDTH, heads * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(WIDTH, RANK + ROPE)
        self.kv_a_layernorm = nn.RMSNorm(RANK)
        self.kv_b_proj = linear(RANK, heads * (NOPE + VALUE))
        self.o_proj = linear(heads * VALUE, WIDTH)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (-1, NOPE + ROPE))
        latent, shared = self.kv_a_proj_with_mqa(x).split((RANK, ROPE), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, NOPE + VALUE))
        k, v = kv.split((NOPE, VALUE), -1)
        k = torch.cat((k, shared.unsqueeze(2).expand(*k.shape[:3], ROPE)), -1)
        return self.o_proj(attend(q, k, v))


class Gated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.gate_proj, self.up_proj = linear(WIDTH, inner), linear(WIDTH, inner)
        self.down_proj = linear(inner, WIDTH)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleDict):
    """By their number in the whole model, so that each has one name on whatever rank it is."""

    def forward(self, tokens, weights):
        # A rank without experts takes part in the backward pass as well.
        out = 0 * tokens * weights.sum(1, keepdim=True)
        for number, expert in self.items():
            out = out + weights[:, [int(number)]] * expert(tokens)
        return out


class Stack(nn.Module):
    """The same experts as three stacks of matrices."""

    first = 0  # the number of this rank's first expert

    def __init__(self, experts):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            matrices = [getattr(expert, name).weight.detach() for expert in experts.values()]
            self.register_parameter(name, nn.Parameter(torch.stack(matrices)))

    def forward(self, tokens, weights):
        gate, up, down = (
            p.to_local() if hasattr(p, "to_local") else p
            for p in (self.gate_proj, self.up_proj, self.down_proj)
        )
        mine = weights[:, self.first : self.first + len(gate)]
        inner = functional.silu(tokens @ gate.mT) * (tokens @ up.mT)
        out = (mine.T.unsqueeze(2) * (inner @ down.mT)).sum(0)
        return out + 0 * tokens * weights.sum(1, keepdim=True)


class Mixture(nn.Module):
    group = None  # the ranks that have the other experts

    def __init__(self):
        super().__init__()
        self.gate = linear(WIDTH, EXPERTS)
        self.register_buffer("e_score_correction_bias", torch.linspace(0, 0.1, EXPERTS))
        self.experts = Experts({str(i): Gated(EXPERT_INNER) for i in range(EXPERTS)})
        self.shared_experts = Gated(2 * EXPERT_INNER)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(CHOSEN).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = 2.446 * weights / weights.sum(1, keepdim=True)
        if self.group is None:
            out = self.experts(tokens, weights)
        else:
            everyone = (all_gather_tensor_autograd(t, 0, self.group) for t in (tokens, weights))
            out = reduce_scatter_tensor_autograd(self.experts(*everyone), "sum", 0, self.group)
        return (out + self.shared_experts(tokens)).view_as(x)


class LatentBlock(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = LatentAttention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = mlp

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A stage of a pipeline is one that has lost the rest; names stay those of the whole."""

    def __init__(self, *blocks, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = x if x.is_floating_point() else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def transformer(inner=INNER, tied=False):
    torch.manual_seed(0)
    return Model(*(Block(inner) for _ in range(4)), tied=tied)


def moonlight():
    torch.manual_seed(0)
    return Model(LatentBlock(Gated(INNER)), LatentBlock(Mixture()), LatentBlock(Mixture()))


def stage(number, stages, tied=False):
    """One of the stages of the transformer."""
    model = transformer(tied=tied)
    for index in list(model.layers):
        if int(index) * stages // 4 != number:
            del model.layers[index]
    if number > 0 and not (tied and number == stages - 1):
        model.embed = None
    if number < stages - 1:
        model.norm = model.head = None
    return model


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, Mixture)]


def unstacked(tensors):
    """Each expert's matrices under the names that they have where each is a module."""
    found = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            found[name] = tensor
            continue
        found |= {f"{path}.{i}.{last}.weight": matrix for i, matrix in enumerate(tensor)}
    return found


def matrices(model):
    """Names of what goes to Muon."""
    named = model.named_parameters()
    return [
        name for name, p in named if p.ndim == 2 and name not in ("embed.weight", "head.weight")
    ]


def loss(logits, targets):
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
