"""Models: one file a model of our own, beside timm's, torchvision's, and the user's."""
