"""Train a small ReLU-sparse Llama on a text, on a CPU, and write it as a Hugging Face checkpoint.

    python tools/small_model/train.py CORPUS_DIR OUT_DIR [--steps N]

CORPUS_DIR has train.txt and held_out.txt (of corpus.py). A run that was stopped goes on from OUT_DIR/state.pt.
The FFN is relu(gate x) * (up x). What makes it sparse is a penalty on mean(relu(g)) / rms(g) of each layer's gate
activations g, which doesn't change when g is scaled; its weight follows the density, as in ProSparse (2402.13516)
the L1 penalty's grows in steps. Matrices are stepped with Muon (Jordan et al. 2024), all else with Adam.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

N_VOCAB, N_CTX = 4096, 512
DIM, N_FF, N_LAYERS, N_HEADS, N_KV, HEAD = 256, 768, 5, 4, 2, 64
EPS, ROPE_BASE = 1e-5, 10000.0
END = "<|endoftext|>"
#: As SmolLM2's: digits one by one, then GPT-2's words.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(corpus: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, file: Path) -> NDArray[np.uint16]:
    """All tokens of a file; an empty line is the end of a text."""
    texts = file.read_text().split("\n\n")
    end = tokenizer.token_to_id(END)
    ids = [[end, *e.ids] for i in range(0, len(texts), 1000) for e in tokenizer.encode_batch(texts[i : i + 1000])]
    return np.concatenate([np.array(text, np.uint16) for text in ids])


class Layer(nn.Module):
    """Attention, and an FFN that is relu(gate x) * (up x)."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(DIM, EPS), nn.RMSNorm(DIM, EPS)
        self.q, self.o = nn.Linear(DIM, N_HEADS * HEAD, bias=False), nn.Linear(N_HEADS * HEAD, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, N_KV * HEAD, bias=False), nn.Linear(DIM, N_KV * HEAD, bias=False)
        self.gate, self.up = nn.Linear(DIM, N_FF, bias=False), nn.Linear(DIM, N_FF, bias=False)
        self.down = nn.Linear(N_FF, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, n, _ = x.shape
        a = self.attn_norm(x)

        def heads(linear: nn.Linear) -> Tensor:
            return linear(a).view(batch, n, -1, HEAD).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            """Turns pairs (i, i + HEAD / 2), as Hugging Face's Llama does."""
            first, second = y.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(y.dtype)

        y = scaled_dot_product_attention(
            turned(heads(self.q)), turned(heads(self.k)), heads(self.v), is_causal=True, enable_gqa=True
        )
        x = x + self.o(y.transpose(1, 2).reshape(batch, n, -1))
        a = self.ffn_norm(x)
        g = self.gate(a)
        on = torch.relu(g)
        x = x + self.down(on * self.up(a))
        g = g.float()
        return x, torch.relu(g).mean() / g.square().mean().sqrt(), (g.detach() > 0).float().mean()


class Model(nn.Module):
    """A Llama whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.norm = nn.RMSNorm(DIM, EPS)
        nn.init.normal_(self.embed.weight, std=0.02)
        for layer in self.layers:
            for linear in (layer.o, layer.down):
                linear.weight.data *= 0.3
        angle = torch.arange(N_CTX)[:, None] * ROPE_BASE ** (-torch.arange(0, HEAD, 2) / HEAD)  # (N_CTX, HEAD / 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of (batch, n + 1) tokens, the penalty, and the density of each layer."""
        x = self.embed(ids[:, :-1])
        penalties, densities = [], []
        for layer in self.layers:
            x, penalty, density = layer(x, self.cos, self.sin)
            penalties.append(penalty)
            densities.append(density)
        logits = nn.functional.linear(self.norm(x), self.embed.weight)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        return loss, torch.stack(penalties).mean(), torch.stack(densities)


def rate(done: int, steps: int) -> float:
    """A share of the highest rate: it rises, stays, and falls to nothing over the last two fifths."""
    return min(1.0, done / min(100, steps / 10), (steps - done) / (steps * 0.4))


def write_checkpoint(model: Model, out: Path) -> None:
    names = {
        "embed": "embed_tokens",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    tensors = {
        "model." + ".".join(names.get(part, part) for part in name.split(".")): value.detach().clone()
        for name, value in model.named_parameters()
    }
    save_file(tensors, out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "relu",
        "hidden_size": DIM,
        "intermediate_size": N_FF,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV,
        "head_dim": HEAD,
        "vocab_size": N_VOCAB,
        "max_position_embeddings": N_CTX,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "bos_token": END, "eos_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--density", type=float, default=0.1, help="what the penalty's weight is steered to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    vocabulary = args.out / "tokenizer.json"
    if not vocabulary.exists():
        train_tokenizer(args.corpus / "train.txt").save(str(vocabulary))
    tokens = {}
    for part in ("train", "held_out"):
        cached = args.out / f"{part}.npy"
        if not cached.exists():
            np.save(cached, encode(Tokenizer.from_file(str(vocabulary)), args.corpus / f"{part}.txt"))
        tokens[part] = np.load(cached)
        print(f"{part}: {len(tokens[part]):,} tokens", flush=True)

    torch.manual_seed(0)
    model = Model()
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    done, weight = 0, 0.01
    saved = args.out / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        for optimizer, was in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(was)
        done, weight = state["done"], state["weight"]

    def save() -> None:
        partial = saved.with_suffix(".partial")
        states = [optimizer.state_dict() for optimizer in optimizers]
        torch.save({"model": model.state_dict(), "optimizers": states, "done": done, "weight": weight}, partial)
        partial.rename(saved)

    def run(ids: NDArray[np.uint16]) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.from_numpy(ids.astype(np.int64)))

    held_out = tokens["held_out"][: 64 * (N_CTX + 1)].reshape(-1, 8, N_CTX + 1)
    began, first, mean = time.monotonic(), done, None
    while done < args.steps:
        rng = np.random.default_rng(done)
        starts = rng.integers(0, len(tokens["train"]) - N_CTX - 1, args.batch)
        loss, penalty, densities = run(np.stack([tokens["train"][s : s + N_CTX + 1] for s in starts]))
        (loss + weight * penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate(done + 1, args.steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss, density = loss.detach(), float(densities.mean())
        weight = float(np.clip(weight * np.exp(0.02 * np.clip(density / args.density - 1, -1, 1)), 1e-3, 3.0))
        mean = float(loss) if mean is None else 0.98 * mean + 0.02 * float(loss)
        done += 1
        if done % 50 == 0:
            speed = (done - first) * args.batch * N_CTX / (time.monotonic() - began)
            print(
                f"{done}: loss {mean:.3f}, density {density:.3f}, weight {weight:.3f}, {speed:.0f} tokens/s", flush=True
            )
        if done % 500 == 0 or done == args.steps:
            save()
            with torch.no_grad():
                told = [run(ids) for ids in held_out]
            loss, layers = np.mean([float(t[0]) for t in told]), np.mean([t[2].numpy() for t in told], 0)
            print(f"held out: perplexity {np.exp(loss):.2f}, density {np.round(layers, 3)}", flush=True)
    write_checkpoint(model, args.out)


if __name__ == "__main__":
    main()
