"""Every method in a plain PyTorch loop, with the lines of its card and no other part of the suite."""

import math
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18
from torchvision.transforms import v2
from transformers import BertConfig, BertForMaskedLM

from common.training.card import PLACES, cards, plain_loop

BACKEND = 'backend="aot_eager"'  # asks for no C++ compiler
NO_COMPILER = {f"{name}(model)": f"{name}(model, {BACKEND})" for name in ("compile_model", "compile_layers")}
NO_COMPILER["apply_ghost_batch_norm(model)"] = "apply_ghost_batch_norm(model, samples=2)"  # of a batch of 4
EPOCHS = {"scale_schedule": 4, "sam": 5}  # of two steps; else two epochs
LOOP = """
{With the data}
model = build()
{With the model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{With the optimizer}
step, num_steps = 0, num_epochs * len(dataset) // 4
for epoch in range(num_epochs):
    {Each epoch}
    for BATCH in DataLoader(dataset, batch_size=4, shuffle=True):
        {Each batch}
        LOSS
        {For the loss}
        optimizer.zero_grad()
        loss.backward()
        {Before each step}
        optimizer.step()
        {After each step}
        losses.append(loss.item())
        step += 1
"""
PLAIN_LOSS = "loss = F.cross_entropy(model(images), labels)"
IMAGES = LOOP.replace("BATCH", "images, labels").replace("LOSS", PLAIN_LOSS)
TEXT = LOOP.replace("BATCH", "batch").replace("LOSS", "loss = model(**batch).loss")


class Pictures(Dataset):
    """Random images of ten of a thousand classes, through a usual pipeline without a crop."""

    def __init__(self):
        scaled = v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)
        self.transform = v2.Compose([v2.PILToTensor(), *scaled])

    def __len__(self):
        return 8

    def __getitem__(self, number):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        return self.transform(Image.fromarray(pixels)), number % 10


class Sentences(Dataset):
    """Random tokens of different lengths, padded to 40, every seventh masked."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        length = 10 + 4 * number % 31
        is_token = torch.arange(40) < length
        tokens = torch.randint(1, 61, (40,), generator=torch.Generator().manual_seed(number))
        return {
            "input_ids": tokens * is_token,
            "attention_mask": is_token.long(),
            "token_type_ids": torch.zeros(40, dtype=torch.int64),
            "labels": tokens.where(is_token & (torch.arange(40) % 7 == 2), -100),
        }


def build_bert():
    config = BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def with_lines(loop, imports, lines):
    """Return the loop with the lines of a method in their places; conditions record when they are met."""
    record = "; met.append(step)"
    lines = [(where, code + record * code.startswith("if ")) for where, code in lines]
    for place in PLACES:
        block = "\n".join(NO_COMPILER.get(code, code) for where, code in lines if where == place)
        before = loop.partition(f"{{{place}}}")[0].rpartition("\n")[2]
        loop = loop.replace(f"{before}{{{place}}}", textwrap.indent(block, before))
    return "\n".join([*imports, loop])


def marked(card):
    return pytest.mark.on_demand if card.name.startswith("compile") else ()


@pytest.mark.parametrize("card", [pytest.param(card, id=card.name, marks=marked(card)) for card in cards()])
def test_the_lines_of_a_card_train_a_plain_model(card):
    torch.manual_seed(0)
    torch._dynamo.reset()
    imports, lines = plain_loop(card)
    assert lines, f"{card.module} has no `Use.` line, see common/training/card.py"
    is_text = card.module.startswith("language_bert") or card.name == "low_precision_layernorm"
    names = {
        "torch": torch,
        "F": torch.nn.functional,
        "DataLoader": DataLoader,
        "num_epochs": EPOCHS.get(card.name, 2),
        "dataset": Sentences() if is_text else Pictures(),
        "evaluation_dataset": Pictures(),
        "build": build_bert if is_text else resnet18,
        "losses": [],
        "met": [],
    }
    exec(with_lines(TEXT if is_text else IMAGES, imports, lines), names)
    assert len(names["losses"]) == 2 * (1 if card.name == "scale_schedule" else EPOCHS.get(card.name, 2))
    assert all(map(math.isfinite, names["losses"]))
    assert bool(names["met"]) == any(code.startswith("if ") for _, code in lines)
    if not is_text:
        for data in (names["dataset"], names["evaluation_dataset"]):
            assert data[0][0].dtype == torch.float32 and data[0][0].min() < 0  # normalized
