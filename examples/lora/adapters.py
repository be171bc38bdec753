"""LoRA adapters (peft) on a small transformer, with AdamW and SCAFFOLD.

A transformer over characters, whose weights are frozen and stand for a pretrained model's, learns
at six sites to tell apart sentences about three subjects; each site has sentences of two. Only the
adapters and the output layer are trained and sent, and a client's state has their size.

    uv sync --group examples --inexact
    uv run --no-sync python examples/lora/adapters.py scaffold fedavg --rounds 10
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedaccord import simulate

SITES, LENGTH, WIDTH = 6, 48, 64
SUBJECTS = {
    "weather": ("rain", "a storm", "the sun", "snow", "fog", "a warm wind"),
    "music": ("a choir", "the violin", "a loud band", "the piano", "a song", "drums"),
    "food": ("bread", "a soup", "the apple", "rice", "cheese", "a sweet cake"),
}
FRAMES = ("today we had {}", "there was {} in town", "{} again, she said", "I remember {}")


class Classifier(nn.Module):
    """The mean over characters of a transformer's output, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.classes = nn.Linear(WIDTH, len(SUBJECTS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        attention = (self.query(x) @ x.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        x = x + attention @ self.value(x)
        x = self.norm(x + self.back(torch.relu(self.hidden(x))))
        return self.classes((x * (tokens != 0)[..., None]).mean(1))


def network() -> nn.Module:
    """The classifier with frozen weights, adapters of rank 4 and a trained output layer."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, target_modules=["query", "value", "hidden", "back"], modules_to_save=["classes"]
    )
    return get_peft_model(Classifier(), config)


def sentences(subjects: list[int], count: int, draw: random.Random) -> TensorDataset:
    """Token ids (count, LENGTH), int64, and the subjects (count,)."""
    words, labels = [*SUBJECTS.values()], [draw.choice(subjects) for _ in range(count)]
    texts = [draw.choice(FRAMES).format(draw.choice(words[k])) for k in labels]
    rows = [text.encode()[:LENGTH].ljust(LENGTH, b"\0") for text in texts]
    return TensorDataset(torch.tensor([[*row] for row in rows]), torch.tensor(labels))


def accuracies(methods: list[str], rounds: int) -> dict[str, list[float]]:
    """The test accuracy before the first round and after each one."""
    draw = random.Random(0)
    clients = [sentences([i % 3, (i + 1) % 3], 120, draw) for i in range(SITES)]
    test = sentences([0, 1, 2], 300, draw)
    accuracies: dict[str, list[float]] = {}
    for method in methods:
        metrics = simulate(
            method,
            clients=clients,
            test=test,
            model=network(),
            optimizer="adamw",
            lr=0.003,
            rounds=rounds,
            participation=0.5,
            local_epochs=2,
            batch_size=20,
        ).metrics
        accuracies[method] = metrics["test-accuracy"].tolist()
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["scaffold", "fedavg"])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    model = network()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained} of {sum(p.numel() for p in model.parameters())} parameters are trained")
    for method, values in accuracies(arguments.methods, arguments.rounds).items():
        print(method, " ".join(f"{100 * value:.1f}%" for value in values))
