"""Zero gamma: every block starts as the identity."""

import torch

from image_classification.methods.zero_gamma import apply_zero_gamma
from image_classification.model import build_resnet


def test_the_last_norm_of_every_block_is_zero_and_no_other():
    for name, blocks in (("resnet18", 8), ("resnet50", 16)):
        model = build_resnet(name, 10)
        assert apply_zero_gamma(model) == blocks
        zeros = [
            key for key, value in model.state_dict().items() if key.endswith("weight") and not value.any()
        ]
        last = "bn2.weight" if name == "resnet18" else "bn3.weight"
        assert len(zeros) == blocks and all(key.endswith(last) for key in zeros)


def test_a_block_without_downsampling_passes_its_input_on():
    model = build_resnet("resnet18", 10).eval()
    apply_zero_gamma(model)
    features = torch.rand(1, 64, 8, 8)
    torch.testing.assert_close(model.layer1[1](features), features)
