"""ResNet-50 on ImageNet, to 75.9 % top-1 accuracy."""
